"""What every HTTP interface of a gateway is made of: errors, bodies, tokens, described operations, and the server."""
