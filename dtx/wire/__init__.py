"""Protocol code without input and output: bytes in, values and bytes out."""
