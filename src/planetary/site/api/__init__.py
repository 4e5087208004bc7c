"""The control API of a site: groups of operations, and the application they make."""
