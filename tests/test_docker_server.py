import docker.errors
import pytest

from bench.failures import EngineFailed
from bench.servers.base import (
    DockerOptions,
    Exit,
    LaunchSpec,
)
from bench.servers.docker import DockerServer, leftovers


class FakeContainer:
    def __init__(self, name, calls):
        self.name = name
        self.calls = calls
        self.attrs = {"State": {"Status": "running"}}

    def start(self):
        self.calls.append("start")

    def reload(self):
        pass

    def logs(self, **options):
        yield b"GPU KV cache size: 160 tokens\n"

    def stop(self, timeout):
        self.calls.append("stop")

    def remove(self, force, v):
        self.calls.append("remove")


class FakeImage:
    def __init__(self):
        self.id = "sha256:1"
        self.attrs = {"RepoDigests": ["repo@sha256:2"]}


class FakeDocker:
    """As much of a docker.DockerClient as the launcher uses."""

    def __init__(self, create_error=None, image=FakeImage):
        self.calls = []
        self.created = None
        self.create_error = create_error
        self.image = image
        self.containers = self.images = self

    def create(self, image, command, **settings):
        self.created = (image, command, settings)
        if self.create_error:
            raise docker.errors.APIError("500", explanation=self.create_error)
        return FakeContainer(settings["name"], self.calls)

    def get(self, name):
        if name.startswith("servecast-"):
            raise docker.errors.NotFound("gone")
        if self.image is None:
            raise docker.errors.ImageNotFound("none")
        return self.image()

    def pull(self, name):
        raise docker.errors.APIError("pull access denied")

    def list(self, all, filters):
        assert filters == {"label": "servecast"}
        return [FakeContainer("servecast-old-1", self.calls)]


def docker_spec(tmp_path, **options):
    settings = {"image": "repo:v1", "shm_bytes": 1 << 28, "gpus": None} | options
    return LaunchSpec(
        "vllm", ("m", "--x", "1"), "m", tmp_path / "log", name="Run One", docker=DockerOptions(**settings)
    )


def test_a_container_is_labelled_named_and_published_on_loopback_only(tmp_path):
    client = FakeDocker()
    mounts = ((tmp_path, "/models/m"),)
    server = DockerServer(docker_spec(tmp_path, mounts=mounts, entrypoint=("vllm", "serve")), client=client)
    server.start()
    image, command, settings = client.created
    port = int(server.base_url.rpartition(":")[2])
    assert image == "repo:v1"
    assert command == ["m", "--x", "1", "--host", "0.0.0.0", "--port", "8000"]
    assert settings["ports"] == {"8000/tcp": ("127.0.0.1", port)}
    assert settings["labels"] == {"servecast": "1", "servecast.run": "Run One"}
    assert settings["name"].startswith("servecast-run-one-")
    assert settings["environment"]["HF_HUB_OFFLINE"] == "1"
    assert settings["entrypoint"] == ["vllm", "serve"]
    assert settings["shm_size"] == 1 << 28
    assert "ipc_mode" not in settings
    assert "device_requests" not in settings
    mount = settings["mounts"][0]
    assert (mount["Target"], mount["ReadOnly"]) == ("/models/m", True)
    facts = server.facts()
    assert (facts["image_digest"], facts["image_id"]) == ("repo@sha256:2", "sha256:1")
    server.stop()
    assert client.calls == ["start", "stop", "remove"]
    assert "160 tokens" in server.logs()


def test_a_container_on_the_host_network_with_gpus_and_the_hosts_ipc(tmp_path):
    client = FakeDocker()
    options = {"network": "host", "shm_bytes": None, "gpus": "all"}
    server = DockerServer(docker_spec(tmp_path, **options), client=client)
    server.start()
    _, command, settings = client.created
    assert command[-4:] == ["--host", "127.0.0.1", "--port", server.base_url.rpartition(":")[2]]
    assert settings["network_mode"] == "host"
    assert settings["ipc_mode"] == "host"
    assert settings["device_requests"][0]["Count"] == -1
    assert "ports" not in settings
    server.stop()


def test_two_runs_never_share_a_container_name(tmp_path):
    names = {DockerServer(docker_spec(tmp_path), client=FakeDocker()).name for _ in range(10)}
    assert len(names) == 10


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("Bind for 127.0.0.1:1 failed: port is already allocated", "port_taken"),
        ('Conflict. The container name "/servecast-x" is already in use', "name_taken"),
        ('could not select device driver "" with capabilities: [[gpu]]', "no_gpu_runtime"),
        ("something new", "docker_refused"),
    ],
)
def test_what_docker_refuses_is_named(tmp_path, error, kind):
    server = DockerServer(docker_spec(tmp_path), client=FakeDocker(create_error=error))
    with pytest.raises(EngineFailed) as caught:
        server.start()
    assert caught.value.failure.kind == kind
    server.stop()


def test_an_image_that_is_not_to_be_had(tmp_path):
    server = DockerServer(docker_spec(tmp_path), client=FakeDocker(image=None))
    with pytest.raises(EngineFailed, match="image_missing"):
        server.start()


def test_a_container_that_was_killed_for_memory(tmp_path):
    server = DockerServer(docker_spec(tmp_path), client=FakeDocker())
    server.start()
    assert server.exited() is None
    state = {"Status": "exited", "ExitCode": 137, "OOMKilled": True}
    server._container.attrs = {"State": state}
    assert server.exited() == Exit(137, "killed by the kernel for want of memory")
    server.stop()


def test_leftovers_are_found_by_label():
    assert leftovers(FakeDocker()) == ["servecast-old-1"]
