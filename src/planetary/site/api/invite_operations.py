"""Invites: list, make, revoke."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from planetary.core.clock import SystemClock
from planetary.core.errors import ConflictError, UserError
from planetary.core.printable import is_name
from planetary.fleet.gateway.invites import InviteList as Invites
from planetary.net import invite
from planetary.site.api.views import InviteRequest, InvitesView, InviteView, NewInvite
from planetary.site.site import Site
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong
from planetary.web.operations import Operation


class InviteOperations:
    """Operations on invites. A gateway without TLS has no invites and refuses them."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._clock = SystemClock()

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="GET",
                path="/v1/invites",
                name="list_invites",
                text="List invites, without their tokens.",
                group="invites",
                scope=Scope.ADMIN,
                handler=self._list,
                answer=InvitesView,
                refuses=(409,),
            ),
            Operation(
                method="POST",
                path="/v1/invites",
                name="make_invite",
                text="Make a token that lets a machine join.",
                group="invites",
                scope=Scope.ADMIN,
                handler=self._make,
                body=InviteRequest,
                optional=True,
                answer=NewInvite,
                status=201,
                refuses=(409,),
            ),
            Operation(
                method="DELETE",
                path="/v1/invites/{invite}",
                name="revoke_invite",
                text="Refuse an invite from now on, and end the connections made with it.",
                group="invites",
                scope=Scope.ADMIN,
                handler=self._revoke,
                answer=InviteView,
                refuses=(404, 409),
            ),
        )

    def _invites(self) -> Invites:
        found = self._site.security.invites
        if found is None:
            raise ConflictError(
                "this gateway was started with --plain-loopback: it asks for no invites and has none", code="no_invites"
            )
        found.refresh()
        return found

    async def _list(self, request: Request) -> InvitesView:
        invites = self._invites()
        names = sorted(invites.issued, key=lambda name: invites.issued[name].made)
        return InvitesView(invites=tuple(_view(invites, name) for name in names))

    async def _make(self, request: Request) -> NewInvite:
        asked: InviteRequest = request.state.body or InviteRequest()
        if asked.node and not is_name(asked.node):
            raise wrong("node", f"expected the name of a node, as --node-name takes it, found {asked.node!r}")
        if not 0 <= asked.expires_in_s < 1e10:
            raise wrong("expires_in_s", f"expected 0 for never, or seconds; found {asked.expires_in_s}")
        now = self._clock.wall()
        expires = now + asked.expires_in_s if asked.expires_in_s else 0.0
        token = self._invites().issue(now, expires=expires, node=asked.node)
        return NewInvite(id=invite.read(token).id, token=token, expires_at=int(expires))

    async def _revoke(self, request: Request) -> InviteView:
        invites = self._invites()
        try:
            name = invites.revoke(request.path_params["invite"], self._clock.wall())
        except UserError as error:
            raise ApiError(404, str(error), code="invite_not_found") from None
        return _view(invites, name)


def _view(invites: Invites, name: str) -> InviteView:
    issued = invites.issued.get(name)
    return InviteView(
        id=name,
        made_at=issued.made if issued is not None else 0.0,
        expires_at=issued.expires if issued is not None else 0,
        node=issued.node if issued is not None else "",
        revoked_at=invites.revoked.get(name),
    )
