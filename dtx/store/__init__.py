"""The message stores: the MessageStore protocol and its implementations."""
