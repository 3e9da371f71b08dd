"""Two clouds on 127.0.0.1, as libcloud's drivers see them: DigitalOcean (API v2, JSON) and Amazon EC2 (query API, XML).

Each keeps machines, checks credentials, and answers in the shape that its API's documentation gives; ids and names are
invented. A test says what is answered instead. Not covered: TLS, and what a cloud does later by itself (a machine that starts).
"""

from __future__ import annotations

import base64
import itertools
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

ADDRESS = "127.0.0.1"
POLL_SECONDS = 0.01  # how soon a server sees that it is to end


@dataclass(frozen=True)
class Asked:
    """A request. query: of its address."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """cut: the connection ends in the middle of the body. silent: nothing comes, and the connection stays."""

    status: int
    body: str
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    silent: bool = False


SILENCE = Answer(0, "", silent=True)


@dataclass
class Machine:
    """state: the cloud's own word."""

    id: str
    name: str
    state: str


@dataclass(frozen=True)
class Created:
    """What a request to create a machine has. more: all that is not one of the others."""

    name: str
    size: str
    image: str
    user_data: str
    more: dict[str, Any]


class Server:
    """HTTP/1.1 over TCP; each connection has a thread."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self._over = over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                got = answer(Asked(self.command, parts.path, dict(parse_qsl(parts.query)), dict(self.headers), body))
                if got.silent:
                    over.wait()
                    self.close_connection = True
                    return
                sent = got.body.encode()
                self.send_response(got.status)
                last = {"Connection": "close"} if got.cut or over.is_set() else {}  # which ends it here, too
                for key, value in {"Content-Length": str(len(sent)), **last, **got.headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(sent[: len(sent) // 2] if got.cut else sent)

            do_POST = do_DELETE = do_GET  # noqa: N815  http.server's names

            def log_message(self, format: str, *args: Any) -> None:
                """Tests say what was asked."""

        self._server = ThreadingHTTPServer((ADDRESS, 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Connections are refused from now on, and what is silent ends. Also from a thread of its own."""
        if not self._over.is_set():
            self._over.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class FakeCloud(ABC):
    """machines: all of the account. steps: what was asked, in order. instead: what is answered to a step rather than by itself.
    last: the step after whose answer nobody listens any more."""

    kind: str
    running: str  # the state of a machine that runs
    steps_of_create: tuple[str, ...]

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self.steps: list[str] = []
        self.created: list[Created] = []
        self.instead: dict[str, Answer] = {}
        self.last = ""
        self._ids = itertools.count(471_100_001)
        self.server = Server(self._answer)

    def has(self, name: str, state: str = "") -> Machine:
        """One more machine; by itself it runs."""
        self.machines.append(Machine(self.new_id(), name, state or self.running))
        return self.machines[-1]

    def _answer(self, asked: Asked) -> Answer:
        step = self.step(asked)
        self.steps.append(step)
        if not self.knows(asked):
            return self.refusal("credentials")
        answer = self.instead.get(step) or self.answer(step, asked)
        if step == self.last:
            self.server.close()
        return answer

    @abstractmethod
    def file(self) -> str:
        """The fleet's file: what a user writes, but for its first line and `call_seconds`."""

    @abstractmethod
    def new_id(self) -> str: ...

    @abstractmethod
    def step(self, asked: Asked) -> str: ...

    @abstractmethod
    def knows(self, asked: Asked) -> bool: ...

    @abstractmethod
    def answer(self, step: str, asked: Asked) -> Answer: ...

    @abstractmethod
    def refusal(self, why: str) -> Answer: ...


# --- DigitalOcean ------------------------------------------------------------------------------------------------------

DROPLET_REFUSALS = {
    "quota": (422, "unprocessable_entity", "creating this/these droplet(s) will exceed your droplet limit"),
    "rate": (429, "too_many_requests", "API rate limit exceeded"),
    "credentials": (401, "unauthorized", "Unable to authenticate you"),
    "request": (422, "unprocessable_entity", "Name is not a valid hostname"),
    "broken": (500, "server_error", "Unexpected server-side error"),
    "busy": (503, "service_unavailable", "Temporarily down for maintenance"),
    "gone": (404, "not_found", "The resource you were accessing could not be found."),
}
REGION = {"slug": "fra1", "name": "Frankfurt 1", "features": ["metadata"], "available": True, "sizes": ["s-2vcpu-4gb"]}
SIZE = {
    "slug": "s-2vcpu-4gb", "memory": 4096, "vcpus": 2, "disk": 80, "transfer": 4.0, "price_monthly": 24.0,
    "price_hourly": 0.03571, "regions": ["fra1"], "available": True, "description": "Basic",
}  # fmt: skip


def _image(id: int, name: str) -> dict[str, Any]:
    return {
        "id": id, "name": name, "type": "custom", "distribution": "Debian", "slug": None, "public": False, "regions": ["fra1"],
        "created_at": "2026-03-01T10:00:00Z", "min_disk_size": 20, "size_gigabytes": 1.7, "status": "available", "tags": [],
    }  # fmt: skip


class FakeDroplets(FakeCloud):
    """Lists come in pages."""

    kind, running = "digitalocean", "active"
    token = "dop_v1_of_a_test"
    images = (_image(88001, "somebody's"), _image(88002, "base"), _image(88003, "other"), _image(88004, "roq-2026-03"))
    steps_of_create = ("list", "size", "image", "location", "create")

    def file(self) -> str:
        """See FakeCloud. Its driver takes no address: the tests' fixture has it connect here."""
        return """[cloud]
driver = "digitalocean"
size = "s-2vcpu-4gb"
image = "88004"
user_data = "ex_user_data"
arguments = { key = "$CLOUD_KEY" }
options = { location = "fra1", ex_create_attr = { tags = ["roq"], ipv6 = true } }
"""

    def new_id(self) -> str:
        """See FakeCloud."""
        return str(next(self._ids))

    def knows(self, asked: Asked) -> bool:
        """See FakeCloud."""
        return asked.headers.get("Authorization") == f"Bearer {self.token}"

    def step(self, asked: Asked) -> str:
        """See FakeCloud."""
        if asked.path.startswith("/v2/droplets"):
            return {"GET": "list", "POST": "create", "DELETE": "destroy"}[asked.method]
        steps = {"/v2/sizes": "size", "/v2/regions": "location", "/v2/images": "images"}
        return steps.get(asked.path, "image")

    def answer(self, step: str, asked: Asked) -> Answer:
        """See FakeCloud."""
        listed = {
            "list": ("droplets", [self._droplet(machine) for machine in self.machines]),
            "size": ("sizes", [SIZE]),
            "location": ("regions", [{**REGION, "slug": "ams3", "name": "Amsterdam 3"}, REGION]),
            "images": ("images", list(self.images)),
        }
        if step in listed:
            return self._page(asked, *listed[step])
        id = asked.path.rpartition("/")[2]
        if step == "create":
            return self._create(json.loads(asked.body))
        if step == "destroy":
            found = [machine for machine in self.machines if machine.id == id]
            self.machines = [machine for machine in self.machines if machine.id != id]
            return Answer(204, "") if found else self.refusal("gone")
        images = [image for image in self.images if str(image["id"]) == id]
        return Answer(200, json.dumps({"image": images[0]})) if images else self.refusal("gone")

    def refusal(self, why: str) -> Answer:
        """See FakeCloud."""
        status, id, message = DROPLET_REFUSALS[why]
        body = {"id": id, "message": message, "request_id": "5f1c1b0e-0000-4a4a-9b9b-0123456789ab"}
        return Answer(status, json.dumps(body), {"Retry-After": "3600"} if status in (429, 503) else {})

    def _page(self, asked: Asked, key: str, found: list[dict[str, Any]]) -> Answer:
        page, size = int(asked.query.get("page", 1)), int(asked.query["per_page"])
        pages = -(-len(found) // size)
        address = f"https://api.digitalocean.com{asked.path}?per_page={size}&page="
        links = {"next": f"{address}{page + 1}", "last": f"{address}{pages}"} if page < pages else {}
        shown = found[(page - 1) * size : page * size]
        return Answer(200, json.dumps({key: shown, "links": {"pages": links} if links else {}, "meta": {"total": len(found)}}))

    def _create(self, body: dict[str, Any]) -> Answer:
        named = [body.pop(key) for key in ("name", "size", "image", "user_data")]  # "region" is one of the others
        name, size, image, data = map(str, named)
        self.created.append(Created(name, size, image, data, body))
        droplet = self._droplet(self.has(name, "new"))
        action = {"id": 7001, "rel": "create", "href": "https://api.digitalocean.com/v2/actions/7001"}
        return Answer(202, json.dumps({"droplet": droplet, "links": {"actions": [action]}}))

    def _droplet(self, machine: Machine) -> dict[str, Any]:
        network = {"ip_address": "203.0.113.7", "netmask": "255.255.240.0", "gateway": "203.0.113.1", "type": "public"}
        return {
            "id": int(machine.id), "name": machine.name, "memory": 4096, "vcpus": 2, "disk": 80, "locked": False,
            "status": machine.state, "kernel": None, "created_at": "2026-03-02T08:15:00Z", "features": [], "backup_ids": [],
            "snapshot_ids": [], "image": self.images[3], "size": SIZE, "size_slug": "s-2vcpu-4gb", "region": REGION,
            "networks": {"v4": [] if machine.state == "new" else [network], "v6": []}, "tags": ["roq"], "volume_ids": [],
        }  # fmt: skip


# --- EC2 ---------------------------------------------------------------------------------------------------------------

INSTANCE_REFUSALS = {
    "quota": (400, "VcpuLimitExceeded", "You have requested more vCPU capacity than your current limit of 32 allows."),
    "capacity": (500, "InsufficientInstanceCapacity", "There is no m7g.large in this zone now."),
    "rate": (503, "RequestLimitExceeded", "Request limit exceeded."),
    "credentials": (401, "AuthFailure", "AWS was not able to validate the provided access credentials"),
    "request": (400, "InvalidParameterValue", "Invalid value for parameter userData"),
    "broken": (500, "InternalError", "An internal error has occurred"),
    "busy": (503, "Unavailable", "The service is unavailable. Please try again shortly."),
    "gone": (400, "InvalidInstanceID.NotFound", "The instance ID does not exist"),
    "image": (400, "InvalidAMIID.NotFound", "The image id does not exist"),
}
ACTIONS = {
    "DescribeInstances": "list",
    "DescribeAddresses": "addresses",
    "RunInstances": "create",
    "TerminateInstances": "destroy",
}
AMIS = {"ami-0aaa": "somebody's", "ami-0ddd": "roq-2026-03"}
CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}


def _xml(action: str, inside: str) -> Answer:
    body = f'<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>6e1f</requestId>{inside}</{action}Response>'
    return Answer(200, f'<?xml version="1.0" encoding="UTF-8"?>\n{body}', {"Content-Type": "text/xml;charset=UTF-8"})


def _state(element: str, state: str) -> str:
    return f"<{element}><code>{CODES[state]}</code><name>{state}</name></{element}>"


class FakeInstances(FakeCloud):
    """Each machine is a reservation of its own; what was ended stays in the list for an hour, as there."""

    kind, running = "ec2", "running"
    key = "AKIATESTTESTTESTTEST"
    steps_of_create = ("list", "addresses", "image", "create")

    def file(self) -> str:
        """See FakeCloud."""
        return f"""[cloud]
driver = "ec2"
size = "m7g.large"
image = "ami-0ddd"
options = {{ ex_keyname = "operations", ex_security_groups = ["roq"], ex_metadata = {{ team = "data" }} }}
[cloud.arguments]
key = "$CLOUD_KEY"
secret = "s"
region = "eu-central-1"
host = "{ADDRESS}"
port = {self.server.port}
secure = false
"""

    def new_id(self) -> str:
        """See FakeCloud."""
        return f"i-0{next(self._ids):016x}"

    def knows(self, asked: Asked) -> bool:
        """See FakeCloud."""
        return asked.headers["Authorization"].startswith(f"AWS4-HMAC-SHA256 Credential={self.key}/")

    def step(self, asked: Asked) -> str:
        """See FakeCloud."""
        by_id = "ImageId.1" in asked.query
        return ACTIONS.get(asked.query["Action"], "image" if by_id else "images")

    def answer(self, step: str, asked: Asked) -> Answer:
        """See FakeCloud."""
        action, query = asked.query["Action"], dict(asked.query)
        if step == "list":
            reservations = "".join(f"<item>{self._reservation(machine)}</item>" for machine in self.machines)
            return _xml(action, f"<reservationSet>{reservations}</reservationSet>")
        if step == "addresses":
            return _xml(action, "<addressesSet/>")
        if step == "create":
            return self._create(action, query)
        if step == "destroy":
            return self._destroy(action, query["InstanceId.1"])
        wanted = {id: name for id, name in AMIS.items() if query.get("ImageId.1", id) == id}
        items = "".join(
            f"<item><imageId>{id}</imageId><imageState>available</imageState><isPublic>false</isPublic><name>{name}</name></item>"
            for id, name in wanted.items()
        )
        return _xml(action, f"<imagesSet>{items}</imagesSet>") if wanted else self.refusal("image")

    def refusal(self, why: str) -> Answer:
        """See FakeCloud."""
        status, code, message = INSTANCE_REFUSALS[why]
        error = f"<Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Response>{error}<RequestID>6e1f</RequestID></Response>'
        return Answer(status, body)

    def _create(self, action: str, query: dict[str, str]) -> Answer:
        tags = {query.pop(f"{tag}Key"): query.pop(f"{tag}Value") for tag in [key[:-3] for key in query if key.endswith(".Key")]}
        data = base64.b64decode(query.pop("UserData")).decode()
        named = [tags.pop("Name"), *(query.pop(key) for key in ("InstanceType", "ImageId"))]
        del query["Action"], query["Version"]
        self.created.append(Created(named[0], named[1], named[2], data, {**query, "tags": tags}))
        return _xml(action, self._reservation(self.has(named[0], "pending")))

    def _destroy(self, action: str, id: str) -> Answer:
        for machine in self.machines:
            if machine.id == id:
                before, machine.state = machine.state, "shutting-down"
                states = _state("currentState", machine.state) + _state("previousState", before)
                return _xml(action, f"<instancesSet><item><instanceId>{id}</instanceId>{states}</item></instancesSet>")
        return self.refusal("gone")

    def _reservation(self, machine: Machine) -> str:
        tags = (
            f"<item><key>team</key><value>data</value></item><item><key>Name</key><value>{escape(machine.name)}</value></item>"
        )
        instance = f"""<instanceId>{machine.id}</instanceId><imageId>ami-0ddd</imageId>{_state("instanceState", machine.state)}
<privateDnsName/><dnsName/><keyName>operations</keyName><instanceType>m7g.large</instanceType>
<launchTime>2026-03-02T08:15:00.000Z</launchTime><privateIpAddress>10.0.0.7</privateIpAddress><tagSet>{tags}</tagSet>"""
        set_ = f"<instancesSet><item>{instance}</item></instancesSet>"
        return f"<reservationId>r-{machine.id[2:]}</reservationId><ownerId>999999999999</ownerId><groupSet/>{set_}"
