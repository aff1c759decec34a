"""Tocsin: schedule jobs that run late rather than never."""
