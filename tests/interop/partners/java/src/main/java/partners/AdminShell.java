package partners;

import com.google.gson.Gson;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * mqadmin, many commands in one JVM: a JSON array of words a line in, {"output": ..., "errors": ...} a line out.
 * A command line that mqadmin cannot parse ends the process, as in mqadmin; the test then fails and names the command.
 */
public final class AdminShell {
    private AdminShell() {
    }

    /** Some of mqadmin's commands hold a client that can be started only once, so each line gets new commands. */
    private static void forgetCommands() throws IllegalAccessException {
        for (Field field : MQAdminStartup.class.getDeclaredFields()) {
            if (field.getType() == List.class) {
                field.setAccessible(true);
                ((List<?>) field.get(null)).clear();
            }
        }
    }

    public static void main(String[] arguments) throws Exception {
        Gson gson = new Gson();
        PrintStream answers = System.out;
        PrintStream errors = System.err;
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = gson.fromJson(line, String[].class);
            ByteArrayOutputStream output = new ByteArrayOutputStream();
            ByteArrayOutputStream failures = new ByteArrayOutputStream();
            System.setOut(new PrintStream(output, true, StandardCharsets.UTF_8));
            System.setErr(new PrintStream(failures, true, StandardCharsets.UTF_8));
            try {
                forgetCommands();
                MQAdminStartup.main0(words, null);
            } finally {
                System.setOut(answers);
                System.setErr(errors);
            }
            Map<String, String> answer = new LinkedHashMap<>();
            answer.put("output", output.toString(StandardCharsets.UTF_8));
            answer.put("errors", failures.toString(StandardCharsets.UTF_8));
            answers.println(gson.toJson(answer));
            answers.flush();
        }
        Runtime.getRuntime().halt(0);
    }
}
