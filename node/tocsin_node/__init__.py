"""The Tocsin server."""
