"""The XA switch for C: ``xa_switch_t dtx_xa_switch`` of X/Open, for LIXA, Enduro/X, Tuxedo and their like.

- ``entry.c``: the exported functions; they call Python through :mod:`dtx.client.xa_switch.bridge`.
- :mod:`dtx.client.xa_switch.switch`: the calls and connections of all threads of a process.
- :mod:`dtx.client.xa_switch.messages`: work with messages within a branch.
- :mod:`dtx.client.xa_switch.interface`: numbers of ``xa.h``, flags, open strings.
- :mod:`dtx.client.xa_switch.build`: builds the shared object; ``make xa-switch``.
"""
