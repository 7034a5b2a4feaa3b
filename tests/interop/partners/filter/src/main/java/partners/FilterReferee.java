package partners;

import com.google.gson.Gson;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.filter.expression.MQFilterException;

/**
 * Apache's SQL92 filter: a JSON array of cases a line in, an array of results a line out. A case has an expression and
 * the texts of messages' properties as they are stored. Its result is null if the expression is refused, else a text
 * with a letter for each message: T(rue), F(alse), N(ull), or E(rror) if the evaluation throws.
 */
public final class FilterReferee {
    private FilterReferee() {
    }

    static final class Case {
        String expression;
        List<String> properties;
    }

    private static final class Properties implements EvaluationContext {
        private final Map<String, String> properties;

        Properties(String text) {
            properties = MessageDecoder.string2messageProperties(text);
        }

        @Override
        public Object get(String name) {
            return properties.get(name);
        }

        @Override
        public Map<String, Object> keyValues() {
            return new HashMap<>(properties);
        }
    }

    private static char evaluate(Expression expression, String text) {
        Object result;
        try {
            result = expression.evaluate(new Properties(text));
        } catch (Throwable error) {
            return 'E';
        }
        if (result == null) {
            return 'N';
        }
        return (Boolean) result ? 'T' : 'F';
    }

    private static String judge(Case one) {
        Expression expression;
        try {
            expression = FilterFactory.INSTANCE.get("SQL92").compile(one.expression);
        } catch (MQFilterException error) {
            return null;
        }
        StringBuilder letters = new StringBuilder();
        for (String text : one.properties) {
            letters.append(evaluate(expression, text));
        }
        return letters.toString();
    }

    public static void main(String[] arguments) throws Exception {
        Gson gson = new Gson();
        PrintStream answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            List<String> results = new ArrayList<>();
            for (Case one : gson.fromJson(line, Case[].class)) {
                results.add(judge(one));
            }
            answers.println(gson.toJson(results));
            answers.flush();
        }
    }
}
