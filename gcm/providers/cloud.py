"""Hosts from a cloud, through apache-libcloud: whichever it has a driver for.

A machine is made from an image on which cloud-init runs, and its user data starts roq-hcm. A name is the fleet's, so clouds
need no labels; of two machines with one name (a request that was repeated) both are destroyed.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from gcm.providers.provider import HostSpec, ProviderExhausted, ProviderFailed
from roq.errors import InvalidConfiguration, RoqError
from roq.runtime.installation import install

try:
    from libcloud.common.base import Connection
    from libcloud.common.exceptions import BaseHTTPError, RateLimitReachedError
    from libcloud.common.types import LibcloudError
    from libcloud.compute import providers
    from libcloud.compute.types import NodeState
except ImportError:  # the extra `cloud`
    providers = None

T = TypeVar("T")
CARD = "/etc/roq/host.card"
ENVIRONMENT = "/etc/roq/hcm.env"
QUOTA = ("quota", "limit exceeded", "limitexceeded", "exceed your", "insufficient", "out of capacity")  # as clouds say it
ENDING = "shutting-down"  # EC2's word; libcloud knows no state that leads to the end alone
QUERY = re.compile(r"\?\S+")  # of an address: EC2's requests have all in it, user data with a card, too
WORDS_MAX = 500  # characters of a reason; libcloud puts a whole page into it
USER_DATA = """#!/bin/sh
set -eu
umask 077
mkdir -p /etc/roq
cat >{environment} <<'END'
{lines}
END
{card}
{start}
"""


class CloudProvider:
    """make_driver: a libcloud driver; called once per request, as drivers are not made for threads. size, image: by id or name.
    options: further arguments of its create_node, such as ex_keyname; `location` by id or name, too. start: shell that starts
    roq-hcm with the variables in ENVIRONMENT. user_data: name of the argument that takes it."""

    def __init__(
        self, make_driver: Callable[[], Any], size: str, image: str, start: str, user_data: str, options: Mapping[str, Any]
    ) -> None:
        self._make_driver, self._size, self._image = make_driver, size, image
        self._start, self._user_data, self._options = start, user_data, dict(options)

    def create(self, spec: HostSpec) -> None:
        """See HostProvider."""

        def create(driver: Any) -> None:
            if any(node.name == spec.name for node in _living(driver)):
                return
            size, image = _chosen(driver.list_sizes(), self._size), _image(driver, self._image)
            options = dict(self._options)
            if "location" in options:  # some drivers need one, and none takes its name
                options["location"] = _chosen(driver.list_locations(), options["location"])
            if self._user_data:
                options[self._user_data] = user_data(spec, self._start)
            driver.create_node(name=spec.name, size=size, image=image, **options)

        self._with(create)

    def names(self, fleet: str) -> list[str]:
        """See HostProvider."""
        return self._with(lambda driver: [str(node.name) for node in _living(driver) if _is_of(node.name, fleet)])

    def destroy(self, name: str, fleet: str) -> None:
        """See HostProvider."""

        def destroy(driver: Any) -> None:
            for node in _living(driver):
                if node.name == name and _is_of(name, fleet):
                    _destroy(driver, node)

        self._with(destroy)

    def _with(self, work: Callable[[Any], T]) -> T:
        try:
            return work(self._make_driver())
        except RoqError:
            raise
        except Exception as error:  # a driver raises whatever its cloud's answer led it into
            words = QUERY.sub("?…", " ".join(f"{type(error).__name__}: {_told(error)}".split()))
            exhausted = isinstance(error, RateLimitReachedError) or any(word in words.lower() for word in QUOTA)
            kind = ProviderExhausted if exhausted else ProviderFailed
            raise kind(words[:WORDS_MAX]) from error


def cloud_driver(kind: str, arguments: Mapping[str, Any], seconds: float) -> Callable[[], Any]:
    """Makes drivers of this kind, as libcloud names it ("ec2", "openstack", …). seconds: bound of one request."""
    if providers is None:
        raise ProviderFailed(f"hosts from a cloud need apache-libcloud: {install('cloud')}")
    try:
        driver = providers.get_driver(kind)
    except AttributeError as error:
        raise InvalidConfiguration(f"libcloud knows no driver {kind!r}: {error}") from error

    def make() -> Any:
        made = driver(**arguments)
        if isinstance(connection := getattr(made, "connection", None), Connection):
            connection.timeout, connection.connection = seconds, None  # it came with one of libcloud's own bound, a minute
        return made

    return make


def user_data(spec: HostSpec, start: str) -> str:
    """The script that its cloud-init runs once."""
    lines = "\n".join(f"{key}={shlex.quote(value)}" for key, value in sorted(spec.environment.items()))
    card = ""
    if spec.card:
        lines += f"\nROQ_CARD={CARD}"
        card = f"printf %s {base64.b64encode(spec.card).decode()} | base64 -d >{CARD}"
    return USER_DATA.format(environment=ENVIRONMENT, lines=lines, card=card, start=start)


def _living(driver: Any) -> list[Any]:
    return [node for node in driver.list_nodes() if node.state != NodeState.TERMINATED and node.extra.get("status") != ENDING]


def _is_of(name: str, fleet: str) -> bool:
    return name.startswith(f"roq-{fleet}-")


def _told(error: Exception) -> str:
    return str(error.message if isinstance(error, BaseHTTPError) else error)  # which has what a cloud sent, if no text, too


def _destroy(driver: Any, node: Any) -> None:
    try:
        if not driver.destroy_node(node):
            raise ProviderFailed(f"the cloud refused to destroy {node.name}")
    except BaseHTTPError as error:
        if error.code != HTTPStatus.NOT_FOUND and "NotFound" not in _told(error):  # EC2: InvalidInstanceID.NotFound
            raise  # else somebody was quicker: a list may be older than what has happened


def _image(driver: Any, wanted: str) -> Any:
    """By its id if there is one: a public cloud's list has all images of all its customers."""
    try:
        found = driver.get_image(wanted)
        if str(found.id) == wanted:
            return found
    except RateLimitReachedError:
        raise
    except (NotImplementedError, AttributeError, LookupError, LibcloudError, BaseHTTPError):
        pass  # drivers have no common error for "none of that id"; if it is something else, the list fails as well
    return _chosen(driver.list_images(), wanted)


def _chosen(found: list[Any], wanted: str) -> Any:
    for one in found:
        if wanted in (str(one.id), str(one.name)):
            return one
    raise ProviderFailed(f"the cloud has no {wanted!r}: see `size`, `image` and `location` in the fleet's file")
