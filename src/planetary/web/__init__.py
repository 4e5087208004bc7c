"""Building blocks of every HTTP interface of a gateway: errors, bodies, tokens, described operations, the server."""
