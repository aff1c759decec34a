"""Workers that come with Tocsin: jobs without code of one's own."""
