"""Where messages live: the MessageStore protocol and its implementations."""
