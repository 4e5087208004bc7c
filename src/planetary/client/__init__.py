"""The client of a site or of a hub: requests to the control API, from Python and for the commands."""

API_HOST, API_PORT = "127.0.0.1", 18010
"""Address of a gateway's dashboard and control API, unless they are given."""
DEFAULT_URL = f"http://{API_HOST}:{API_PORT}"
