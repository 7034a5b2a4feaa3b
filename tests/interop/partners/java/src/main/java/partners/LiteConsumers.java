package partners;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Lite pull consumers by name: subscribe, or assign and seek. */
final class LiteConsumers {
    private final Map<String, DefaultLitePullConsumer> consumers = new ConcurrentHashMap<>();

    void addTo(Map<String, Driver.Operation> operations) {
        operations.put("lite.open", this::open);
        operations.put("lite.poll", this::poll);
        operations.put("lite.queues", args -> Messages.showQueues(named(args).fetchMessageQueues(args.text("topic"))));
        operations.put("lite.assign", this::assign);
        operations.put("lite.seek", this::seek);
        operations.put("lite.committed", args -> named(args).committed(Messages.queue(args)));
        operations.put("lite.offsetForTime", args ->
            named(args).offsetForTimestamp(Messages.queue(args), args.large("time", 0)));
        operations.put("lite.commit", args -> {
            named(args).commitSync();
            return null;
        });
        operations.put("lite.close", args -> {
            DefaultLitePullConsumer consumer = named(args);
            consumers.remove(args.text("name"));
            consumer.shutdown();
            return null;
        });
    }

    private DefaultLitePullConsumer named(Args args) {
        DefaultLitePullConsumer consumer = consumers.get(args.text("name"));
        if (consumer == null) {
            throw new IllegalArgumentException("no lite consumer is open under the name " + args.text("name"));
        }
        return consumer;
    }

    private Object open(Args args) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(args.text("group"), Security.hook(args));
        Security.secure(consumer, args);
        consumer.setNamesrvAddr(args.text("namesrv"));
        consumer.setInstanceName(args.text("name"));
        consumer.setEnableMsgTrace(args.flag("trace"));
        consumer.setVipChannelEnabled(false);
        consumer.setPollNameServerInterval(1_000);
        consumer.setPersistConsumerOffsetInterval(1_000);
        consumer.setAutoCommit(args.flag("autoCommit"));
        consumer.setPullBatchSize(args.number("batch", 10));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        for (Map.Entry<String, String> one : args.texts("subscribe").entrySet()) {
            consumer.subscribe(one.getKey(), one.getValue());
        }
        for (Map.Entry<String, String> one : args.texts("sql").entrySet()) {
            consumer.subscribe(one.getKey(), MessageSelector.bySql(one.getValue()));
        }
        consumer.start();
        consumers.put(args.text("name"), consumer);
        return null;
    }

    private Object assign(Args args) throws Exception {
        List<MessageQueue> queues = new ArrayList<>();
        for (Args queue : args.objects("queues")) {
            queues.add(Messages.queue(queue));
        }
        named(args).assign(queues);
        return null;
    }

    private Object seek(Args args) throws Exception {
        DefaultLitePullConsumer consumer = named(args);
        MessageQueue queue = Messages.queue(args);
        switch (args.text("to")) {
            case "begin":
                consumer.seekToBegin(queue);
                break;
            case "end":
                consumer.seekToEnd(queue);
                break;
            default:
                consumer.seek(queue, args.large("to", 0));
        }
        return null;
    }

    /** Polls until it has enough messages or the time is over. */
    private Object poll(Args args) {
        DefaultLitePullConsumer consumer = named(args);
        int count = args.number("count", 1);
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(args.large("wait", 10_000));
        List<MessageExt> messages = new ArrayList<>();
        while (messages.size() < count && System.nanoTime() < deadline) {
            messages.addAll(consumer.poll(200));
        }
        return Messages.showAll(messages);
    }
}
