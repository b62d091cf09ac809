#!/usr/bin/env bash
# A Docker engine of the tests' own on a bare Debian machine, with a base image made on the spot: no registry needed.
#   docker_engine.sh start DIR   engine up; prints the DOCKER_HOST to use
#   docker_engine.sh image DIR   builds servecast-test/python:base from the distribution's packages
#   docker_engine.sh stop DIR    engine down, its mounts and its bridge gone
# No firewall rule is changed: published ports go through Docker's user-land proxy. Where the kernel
# makes no bridge the engine starts without one, and only containers on the host network work.
set -euo pipefail
verb=${1:?start, image or stop}
dir=$(mkdir -p "${2:?a folder}" && cd "$2" && pwd)
# A socket path may hold 107 characters, and a checkout can lie deep, so the socket lives in a short place.
socket_dir=/run/servecast-test-$(printf '%s' "$dir" | cksum | cut -d' ' -f1)
export DOCKER_HOST=${DOCKER_HOST:-unix://$socket_dir/docker.sock}  # an engine that is there is good enough
image=servecast-test/python:base

# Not "install PACKAGES" at once: index updates are slow, and mostly everything is there already.
need() {
  command -v "$1" >/dev/null && return
  [ "$(id -u)" = 0 ] || { echo "$1 is missing, and only root can install it" >&2; exit 1; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >/dev/null
}

launch() {
  nohup dockerd --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false "$@" \
    --data-root "$dir/data" --exec-root "$socket_dir/exec" --pidfile "$socket_dir/pid" -H "$DOCKER_HOST" \
    >"$dir/log" 2>&1 </dev/null &
  local engine=$!
  for _ in $(seq 120); do
    docker info >/dev/null 2>&1 && return 0
    kill -0 "$engine" 2>/dev/null || return 1
    sleep 0.25
  done
  kill "$engine" 2>/dev/null || true
  return 1
}

case $verb in
  start)
    if ! docker info >/dev/null 2>&1; then
      need dockerd docker.io
      [ "$(id -u)" = 0 ] || { echo "a Docker engine can only be started by root" >&2; exit 1; }
      mkdir -p "$socket_dir"
      [ -e /sys/class/net/docker0 ] || touch "$socket_dir/made-bridge"
      if ! launch; then
        rm -f "$socket_dir/pid" "$socket_dir/made-bridge"
        launch --bridge=none || { tail -n 20 "$dir/log" >&2; exit 1; }
      fi
    fi
    echo "DOCKER_HOST=$DOCKER_HOST" ;;
  image)
    docker image inspect "$image" >/dev/null 2>&1 && exit 0
    need debootstrap debootstrap
    if [ ! -e "$dir/rootfs.done" ]; then
      rm -rf "$dir/rootfs"
      debootstrap --variant=minbase --include=python3,libnuma1 bookworm "$dir/rootfs" >"$dir/debootstrap.log" 2>&1 \
        || { tail -n 20 "$dir/debootstrap.log" >&2; exit 1; }
      rm -rf "$dir"/rootfs/var/cache/apt/archives/*.deb "$dir"/rootfs/var/lib/apt/lists/*
      touch "$dir/rootfs.done"
    fi
    tar -C "$dir/rootfs" -c . | docker import - "$image" >/dev/null ;;
  stop)
    [ -f "$socket_dir/pid" ] || exit 0
    pid=$(cat "$socket_dir/pid")
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 300); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    umount "$socket_dir/exec/netns/default" "$dir/data" 2>/dev/null || true
    [ -e "$socket_dir/made-bridge" ] && ip link delete docker0 2>/dev/null || true
    rm -rf "$socket_dir" ;;
  *)
    echo "start, image or stop" >&2
    exit 2 ;;
esac
