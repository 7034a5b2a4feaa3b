"""Orders and payments: two topics, a stream that joins them, and a plot of the time from order to payment.

Run it with a broker and its name server on this machine (see docs/pipeline.md)::

    pip install '.[spark,plots]'
    python orders_and_payments.py 127.0.0.1:9876

It generates its own data: a day of a shop's orders. Most are paid after a while, some are never paid. The results are
written to ``payments.parquet`` and ``payments.png``.
"""

# %% The data: a day of orders, and their payments
import json
import os
import random
import sys
from datetime import UTC, datetime, timedelta

from trimq.client.sync import Message, Producer

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
namesrv = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"
count = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
chance = random.Random(7)
midnight = datetime(2026, 3, 2, tzinfo=UTC)
shops = {"north": 5, "south": 3, "online": 12}


def moment() -> datetime:
    """A random time of the day; more orders are at noon and in the evening than at night."""
    hour = chance.choices(range(24), [1, 1, 1, 1, 1, 2, 3, 5, 6, 7, 8, 11, 12, 9, 7, 7, 8, 10, 12, 13, 11, 8, 4, 2])[0]
    return midnight + timedelta(hours=hour, seconds=chance.uniform(0, 3600))


orders, payments = [], []
for number in range(count):
    ordered = moment()
    shop = chance.choices(list(shops), list(shops.values()))[0]
    amount = round(chance.lognormvariate(3.2, 0.8), 2)
    order = {"order": f"o-{number}", "shop": shop, "amount": amount, "at": ordered.isoformat()}
    orders.append(Message("Orders-demo", json.dumps(order).encode(), tags=shop, keys=order["order"]))
    if chance.random() < 0.93:
        paid = ordered + timedelta(minutes=chance.expovariate(1 / (5 if shop == "online" else 40)))
        payment = {"order": order["order"], "at": paid.isoformat()}
        payments.append(Message("Payments-demo", json.dumps(payment).encode(), keys=order["order"]))

with Producer("shop", namesrv=namesrv) as producer:
    producer.send_batch(orders)
    producer.send_batch(payments)

# %% The two topics as streams
from pyspark.sql import DataFrame, SparkSession, functions as f  # noqa: E402 - a notebook imports at the start of a section

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", 2)
    .config("spark.sql.session.timeZone", "UTC")
    .getOrCreate()
)


def events(topic: str, fields: str) -> DataFrame:
    """The fields of a topic's JSON messages."""
    table = spark.readStream.schema("body binary").format("rocketmq")
    messages = table.options(namesrv=namesrv, topics=topic, startingOffsets="earliest").load()
    return messages.select(f.from_json(messages.body.cast("string"), fields).alias("event")).select("event.*")


ordered = events("Orders-demo", "order string, shop string, amount double, at timestamp")
paid = events("Payments-demo", "order string, at timestamp").withColumnsRenamed(
    {"order": "paid_order", "at": "paid_at"}
)

# %% Join them: when each order was paid
joined = ordered.withWatermark("at", "1 day").join(
    paid.withWatermark("paid_at", "1 day"), f.expr("order = paid_order and paid_at between at and at + interval 1 day")
)
query = (
    joined.writeStream.format("parquet")
    .option("path", "payments.parquet")
    .option("checkpointLocation", "payments-checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()

# %% How long do customers take to pay?
found = spark.read.parquet("payments.parquet")
minutes = (f.unix_timestamp("paid_at") - f.unix_timestamp("at")) / 60
summary = found.groupBy("shop").agg(
    f.count("*").alias("payments"),
    f.round(f.median(minutes), 1).alias("minutes"),
    f.round(f.sum("amount")).alias("sum"),
)
summary.orderBy("shop").show()
hours = found.groupBy("shop", f.hour("at").alias("hour")).agg(f.sum("amount").alias("sum")).collect()
waits = {
    shop: [row.m for row in found.where(found.shop == shop).select(minutes.alias("m")).collect()] for shop in shops
}
spark.stop()

# %% The plot
import matplotlib as mpl  # noqa: E402 - as above

mpl.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - as above

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
for shop in shops:
    sums = {row.hour: row["sum"] for row in hours if row.shop == shop}
    left.plot(range(24), [sums.get(hour, 0.0) for hour in range(24)], label=shop)
    right.hist(waits[shop], bins=40, range=(0, 120), histtype="step", density=True, label=shop)
left.set(title="Paid orders by hour", xlabel="hour of the order", ylabel="sum")
right.set(title="From order to payment", xlabel="minutes", ylabel="share")
left.legend()
right.legend()
figure.tight_layout()
figure.savefig("payments.png", dpi=110)
print(f"{len(orders)} orders, {len(payments)} payments, {sum(map(len, waits.values()))} joined: payments.png")
