"""A hub places jobs on sites: messages, the choice of a site, the hub's journal, and both ends of a site's link."""
