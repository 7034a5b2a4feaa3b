package partners;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.zip.CRC32;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Converts messages, queues and send results between the client's classes and JSON. */
final class Messages {
    private static final int WHOLE_BODY = 256;

    /** The client's setters for messages that are delivered later; 4.9.8 has none of them. */
    private static final Map<String, String> TIMERS = Map.of(
        "delayMs", "setDelayTimeMs", "delaySec", "setDelayTimeSec", "deliverMs", "setDeliverTimeMs");

    private Messages() {
    }

    static Message build(String topic, Args spec) throws Exception {
        StringBuilder body = new StringBuilder(spec.text("body"));
        if (spec.has("size")) {
            int size = spec.number("size", 0);
            for (int i = 0; body.length() < size; i++) {
                body.append((char) ('a' + i * 7 % 26));
            }
        }
        Message message = new Message(topic, body.toString().getBytes(StandardCharsets.UTF_8));
        if (spec.has("tags")) {
            message.setTags(spec.text("tags"));
        }
        if (spec.has("keys")) {
            message.setKeys(spec.text("keys"));
        }
        if (spec.has("delay")) {
            message.setDelayTimeLevel(spec.number("delay", 0));
        }
        for (Map.Entry<String, String> timer : TIMERS.entrySet()) {
            if (spec.has(timer.getKey())) {
                Optional.call(message, timer.getValue(), long.class, spec.large(timer.getKey(), 0));
            }
        }
        message.setFlag(spec.number("flag", 0));
        if (spec.has("wait")) {
            message.setWaitStoreMsgOK(spec.flag("wait"));
        }
        // MessageAccessor accepts reserved names too, which some tests need.
        spec.texts("properties").forEach((name, value) -> MessageAccessor.putProperty(message, name, value));
        return message;
    }

    static Map<String, Object> show(MessageExt message) {
        Map<String, Object> shown = new LinkedHashMap<>();
        byte[] body = message.getBody();
        CRC32 crc = new CRC32();
        crc.update(body);
        shown.put("topic", message.getTopic());
        shown.put("broker", message.getBrokerName());
        shown.put("queue", message.getQueueId());
        shown.put("offset", message.getQueueOffset());
        shown.put("body", new String(body, 0, Math.min(body.length, WHOLE_BODY), StandardCharsets.UTF_8));
        shown.put("length", body.length);
        shown.put("crc", crc.getValue());
        shown.put("tags", message.getTags());
        shown.put("keys", message.getKeys());
        shown.put("msgId", message.getMsgId());
        shown.put("offsetMsgId",
            message instanceof MessageClientExt ? ((MessageClientExt) message).getOffsetMsgId() : message.getMsgId());
        shown.put("uniqKey", message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX));
        shown.put("flag", message.getFlag());
        shown.put("sysFlag", message.getSysFlag());
        shown.put("size", message.getStoreSize());
        shown.put("reconsume", message.getReconsumeTimes());
        shown.put("born", message.getBornTimestamp());
        shown.put("stored", message.getStoreTimestamp());
        shown.put("bornHost", String.valueOf(message.getBornHost()));
        shown.put("storeHost", String.valueOf(message.getStoreHost()));
        shown.put("prepared", message.getPreparedTransactionOffset());
        shown.put("properties", new LinkedHashMap<>(message.getProperties()));
        shown.put("at", System.currentTimeMillis());
        return shown;
    }

    static List<Map<String, Object>> showAll(Iterable<MessageExt> messages) {
        List<Map<String, Object>> shown = new ArrayList<>();
        for (MessageExt message : messages) {
            shown.add(show(message));
        }
        return shown;
    }

    static Map<String, Object> show(SendResult result) {
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("status", result.getSendStatus().name());
        shown.put("msgId", result.getMsgId());
        shown.put("offsetMsgId", result.getOffsetMsgId());
        shown.put("broker", result.getMessageQueue().getBrokerName());
        shown.put("queue", result.getMessageQueue().getQueueId());
        shown.put("offset", result.getQueueOffset());
        shown.put("region", result.getRegionId());
        shown.put("trace", result.isTraceOn());
        shown.put("transactionId", result.getTransactionId());
        shown.put("recallHandle", Optional.get(result, "getRecallHandle"));
        return shown;
    }

    static Map<String, Object> show(MessageQueue queue) {
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("topic", queue.getTopic());
        shown.put("broker", queue.getBrokerName());
        shown.put("queue", queue.getQueueId());
        return shown;
    }

    static List<Map<String, Object>> showQueues(Iterable<MessageQueue> queues) {
        List<Map<String, Object>> shown = new ArrayList<>();
        for (MessageQueue queue : queues) {
            shown.add(show(queue));
        }
        return shown;
    }

    static MessageQueue queue(Args args) {
        return new MessageQueue(args.text("topic"), args.text("broker"), args.number("queue", 0));
    }
}
