package partners;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * Drives the official client for the tests: one JSON request a line on standard input, one JSON answer a line on
 * standard output. A request is {"id": 1, "op": "send", ...arguments}; the answer is {"id": 1, "result": ...} or
 * {"id": 1, "error": {...}}. Each request runs on its own thread, so that one scenario can wait for messages while
 * another sends. One process serves many scenarios, because starting a JVM is slow.
 */
public final class Driver {
    static final Gson GSON = new GsonBuilder().disableHtmlEscaping().serializeNulls().create();

    /** The implementation of one operation; the table of operations has its name as key. */
    interface Operation {
        Object run(Args args) throws Exception;
    }

    private final Map<String, Operation> operations = new TreeMap<>();
    private final PrintStream out;

    private Driver(PrintStream out) {
        this.out = out;
        new Producers().addTo(operations);
        new PushConsumers().addTo(operations);
        new LiteConsumers().addTo(operations);
        new Flood().addTo(operations);
        new Admins().addTo(operations);
        operations.put("versions", args -> versions());
    }

    private static Map<String, Object> versions() throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("java", System.getProperty("java.version"));
        found.put("client", Class.forName("org.apache.rocketmq.common.MQVersion").getField("CURRENT_VERSION").getInt(null));
        found.put("encoding", System.getProperty("rocketmq.serialize.type", "JSON"));
        return found;
    }

    private void answer(long id, String key, Object value) {
        Map<String, Object> reply = new LinkedHashMap<>();
        reply.put("id", id);
        reply.put(key, value);
        String line = GSON.toJson(reply);
        synchronized (out) {
            out.println(line);
            out.flush();
        }
    }

    private void serve(JsonObject request) {
        long id = request.get("id").getAsLong();
        String name = request.get("op").getAsString();
        try {
            Operation operation = operations.get(name);
            if (operation == null) {
                throw new IllegalArgumentException("no operation " + name + "; there are " + operations.keySet());
            }
            answer(id, "result", operation.run(new Args(request)));
        } catch (Throwable failure) {
            failure.printStackTrace();
            answer(id, "error", describe(failure));
        }
    }

    /** A failure as the tests need it: its class, its text, and the texts and response codes of all its causes. */
    static Map<String, Object> describe(Throwable failure) {
        Map<String, Object> description = new LinkedHashMap<>();
        description.put("type", failure.getClass().getSimpleName());
        description.put("message", String.valueOf(failure.getMessage()));
        List<Integer> codes = new ArrayList<>();
        List<String> causes = new ArrayList<>();
        for (Throwable at = failure; at != null; at = at.getCause()) {
            causes.add(String.valueOf(at.getMessage()));
            try {
                Method code = at.getClass().getMethod("getResponseCode");
                codes.add((Integer) code.invoke(at));
            } catch (ReflectiveOperationException noCode) {
                continue;
            }
        }
        description.put("codes", codes);
        description.put("causes", causes);
        return description;
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = System.out;
        System.setOut(System.err);
        Driver driver = new Driver(out);
        ExecutorService threads = Executors.newCachedThreadPool(work -> {
            Thread thread = new Thread(work, "scenario");
            thread.setDaemon(true);
            return thread;
        });
        driver.answer(0, "result", versions());
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JsonObject request = JsonParser.parseString(line).getAsJsonObject();
            threads.execute(() -> driver.serve(request));
        }
        Runtime.getRuntime().halt(0);
    }
}
