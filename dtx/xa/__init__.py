"""The XA core: pure, no input or output, time arrives as an argument."""
