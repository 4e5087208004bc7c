"""Invites: list, make, revoke."""

from __future__ import annotations

from planetary.core.clock import SystemClock
from planetary.core.errors import ConflictError, UserError
from planetary.core.printable import is_name
from planetary.fleet.gateway.invites import InviteList as Invites
from planetary.net import invite
from planetary.site.api.group import SiteGroup
from planetary.site.api.views import InviteRequest, InvitesView, InviteView, NewInvite
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong
from planetary.web.router import operation


class InviteOperations(SiteGroup):
    """Operations on invites. A gateway without TLS has no invites and refuses them."""

    @operation("GET", "/v1/invites", group="invites", scope=Scope.ADMIN, refuses=(409,))
    async def list_invites(self) -> InvitesView:
        """List invites, without their tokens."""
        invites = self._invites()
        names = sorted(invites.issued, key=lambda name: invites.issued[name].made)
        return InvitesView(invites=tuple(_view(invites, name) for name in names))

    @operation("POST", "/v1/invites", group="invites", scope=Scope.ADMIN, status=201, refuses=(409,))
    async def make_invite(self, body: InviteRequest | None = None) -> NewInvite:
        """Make a token that lets a machine join."""
        asked = body or InviteRequest()
        if asked.node and not is_name(asked.node):
            raise wrong("node", f"expected the name of a node, as --node-name takes it, found {asked.node!r}")
        if not 0 <= asked.expires_in_s < 1e10:
            raise wrong("expires_in_s", f"expected 0 for never, or seconds; found {asked.expires_in_s}")
        now = SystemClock().wall()
        expires = now + asked.expires_in_s if asked.expires_in_s else 0.0
        token = self._invites().issue(now, expires=expires, node=asked.node)
        return NewInvite(id=invite.read(token).id, token=token, expires_at=int(expires))

    @operation("DELETE", "/v1/invites/{invite}", group="invites", scope=Scope.ADMIN, refuses=(404, 409))
    async def revoke_invite(self, invite: str) -> InviteView:
        """Refuse an invite from now on, and end the connections made with it."""
        invites = self._invites()
        try:
            name = invites.revoke(invite, SystemClock().wall())
        except UserError as error:
            raise ApiError(404, str(error), code="invite_not_found") from None
        return _view(invites, name)

    def _invites(self) -> Invites:
        found = self._site.security.invites
        if found is None:
            raise ConflictError(
                "this gateway was started with --plain-loopback: it asks for no invites and has none", code="no_invites"
            )
        found.refresh()
        return found


def _view(invites: Invites, name: str) -> InviteView:
    issued = invites.issued.get(name)
    return InviteView(
        id=name,
        made_at=issued.made if issued is not None else 0.0,
        expires_at=issued.expires if issued is not None else 0,
        node=issued.node if issued is not None else "",
        revoked_at=invites.revoked.get(name),
    )
