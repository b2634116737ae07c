"""Keys of a file: who somebody is, and how urgent he may be."""

import pytest

from pipelines.keys import KeyRing, digest, new_key, own_key, read_keys
from schemas.failures import UsageError
from schemas.settings import Key


def test_a_key_is_known_by_its_digest():
    keys = [new_key(), new_key()]
    entries = [
        Key(role=role, digest=digest(key), most_urgent_priority=urgent, requests_per_minute=7)
        for role, key, urgent in zip(("a", "b"), keys, (0, -9), strict=True)
    ]
    caller = KeyRing(entries).find(keys[1])
    assert (caller.role, caller.most_urgent_priority, caller.requests_per_minute) == ("b", -9, 7)
    assert KeyRing(entries).find(keys[0]).role == "a"
    assert not any(key in entry.digest for key in keys for entry in entries)


@pytest.mark.parametrize("given", ["", "wrong", "\udc80é", new_key()])
def test_another_key_is_nobodys(given):
    assert KeyRing([own_key(new_key())]).find(given) is None
    assert KeyRing([]).find(given) is None


def test_a_file_of_keys_says_what_is_wrong_and_shows_no_key(tmp_path):
    path = tmp_path / "keys.yaml"
    entry = f"- role: a\n  digest: {digest('x' * 30)}\n"
    path.write_text(entry)
    assert [key.role for key in read_keys(path)] == ["a"]
    for text, words in {
        "": "expected a list",
        "role: a": "expected a list",
        "- role: a": "entry 1, digest",
        entry + "- role: b\n  digest: secret-secret": "entry 2, digest",
        entry + "  urgent: 1": "urgent",
        "- [secret-secret": "can't be read",
    }.items():
        path.write_text(text)
        with pytest.raises(UsageError, match=words) as caught:
            read_keys(path)
        assert "secret-secret" not in str(caught.value)
    with pytest.raises(UsageError, match="can't be read"):
        read_keys(tmp_path / "nowhere")


def test_a_key_of_ones_own_is_long():
    with pytest.raises(UsageError, match="20 at least"):
        own_key("hunter2")
