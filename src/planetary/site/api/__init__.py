"""The control API of a site: groups of operations, and the application that they make."""
