"""The operators' API for commands: that of a running dtx over HTTP, or the same one in this process."""
