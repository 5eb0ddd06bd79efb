"""The XA switch for C: ``xa_switch_t dtx_xa_switch`` of X/Open, for LIXA, Enduro/X, Tuxedo and their like.

- ``entry.c``: what is exported; every entry point calls Python, through :mod:`dtx.client.xa_switch.bridge`.
- :mod:`dtx.client.xa_switch.switch`: the calls, with their flags, for all threads of a process; their connections.
- :mod:`dtx.client.xa_switch.messages`: what a program does with messages within a branch.
- :mod:`dtx.client.xa_switch.interface`: numbers of ``xa.h``, flags, open strings.
- :mod:`dtx.client.xa_switch.build`: makes the shared object; ``make xa-switch``.
"""
