"""The data pipeline on Spark: archive, reconcile and report over the journals of a fleet. Extra ``dtx[pipeline]``.

Nothing else of dtx imports this package, but for the command line, where its command is used. It uses the DataFrame API
alone, so that the same program runs in this process, on a cluster and through Spark Connect.
"""
