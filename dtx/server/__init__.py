"""The listener, the protocol sniffer and the shells of connections."""
