"""Federations: a hub, whose workers are the gateways of sites, and sites, whose rounds meet their hub's.

Read first `messages.py`, then `hub_gateway.py` and `site_gateway.py`, each a gateway of rounds; `uplink.py` joins
the two.
"""
