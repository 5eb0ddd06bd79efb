"""How what comes from clients is shown to people: safely, at the command line and in pages alike."""
