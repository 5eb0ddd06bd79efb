"""The XA core: pure, without input and output. Time is an argument."""
