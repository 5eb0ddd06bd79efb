"""Alongside mode: a transparent proxy before the broker, with two classes of its own."""
