# versitygw, an S3 server that keeps objects as files: for trying out a tier in a bucket. The program is built before, with
# this machine's Go (docker/build versitygw).

ARG BASE=python:3.13-slim

FROM ${BASE}
RUN useradd --system --uid 10002 --user-group --home-dir /var/lib/versitygw --create-home versitygw
COPY docker/wheels/versitygw/versitygw /usr/local/bin/
USER versitygw
WORKDIR /var/lib/versitygw
VOLUME /var/lib/versitygw
EXPOSE 7070
STOPSIGNAL SIGTERM
# A bucket is a directory.
CMD ["sh", "-c", "mkdir -p data/trimq && exec versitygw --port :7070 posix data"]
