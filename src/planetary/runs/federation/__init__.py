"""Federations: a hub, whose workers are the gateways of sites, and sites, whose rounds meet their hub's.

Read first `messages.py`, then `hub/controller.py` and `site/controller.py`, each a controller of rounds;
`site/uplink.py` joins the two.
"""
