# Debian's etcd, in which controllers keep what they decide. In a file of its own, as a builder without BuildKit runs all
# stages of a file before the one it needs.

ARG BASE=python:3.13-slim

FROM ${BASE}
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends etcd-server \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && install -d -o etcd -g etcd -m 700 /var/lib/etcd
# Controllers read no old versions of keys: those are dropped after an hour, so that the database stays small.
ENV ETCD_DATA_DIR=/var/lib/etcd \
    ETCD_LISTEN_CLIENT_URLS=http://0.0.0.0:2379 \
    ETCD_LISTEN_PEER_URLS=http://0.0.0.0:2380 \
    ETCD_AUTO_COMPACTION_RETENTION=1
USER etcd
WORKDIR /var/lib/etcd
VOLUME /var/lib/etcd
# clients, and the other members
EXPOSE 2379 2380
STOPSIGNAL SIGTERM
CMD ["etcd"]
