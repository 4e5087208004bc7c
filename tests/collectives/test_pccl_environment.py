"""What a program for PCCL gets from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from planetary.compat.pccl.security import INVITE, invite_token
from planetary.core.errors import UserError
from planetary.net.invite import mint

TOKEN = mint(bytes(32), bytes(32), node="a-machine-with-a-long-name" * 8)


def test_invite_is_a_token_or_a_file_that_holds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(TOKEN) > 255, "longer than any name of a file"
    monkeypatch.chdir(tmp_path)
    Path("invite.txt").write_text(f"{TOKEN}\n")
    for given in (TOKEN, "invite.txt", str(tmp_path / "invite.txt")):
        monkeypatch.setenv(INVITE, given)
        assert invite_token() == TOKEN
    monkeypatch.delenv(INVITE)
    assert not invite_token()


@pytest.mark.parametrize("given", ["absent.txt", "folder/absent.txt", "x" * 300])
def test_what_is_neither_is_refused_with_the_reason(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(INVITE, given)
    with pytest.raises(UserError, match=f"cannot read the invite of {INVITE}={given}: "):
        invite_token()
