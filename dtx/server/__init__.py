"""The service: listener, protocol detection, and the connections of clients in both modes."""
