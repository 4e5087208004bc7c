"""A group of operations of a site."""

from __future__ import annotations

from planetary.core.errors import UserError
from planetary.site.jobs import Job
from planetary.site.site import Site
from planetary.web.api_errors import ApiError


class SiteGroup:
    """A group of operations of a site; see `web.router`."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def _job(self, name: str) -> Job:
        """Return the job of a name. Raises `ApiError` (404) when there is none."""
        try:
            return self._site.book.named(name)
        except UserError as error:
            raise ApiError(404, str(error), code="job_not_found") from None
