package partners;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The arguments of one request, with defaults for missing ones. */
final class Args {
    private final JsonObject json;

    Args(JsonObject json) {
        this.json = json;
    }

    boolean has(String key) {
        return json.has(key) && !json.get(key).isJsonNull();
    }

    String text(String key) {
        if (!has(key)) {
            throw new IllegalArgumentException("missing argument " + key);
        }
        return json.get(key).getAsString();
    }

    String text(String key, String otherwise) {
        return has(key) ? json.get(key).getAsString() : otherwise;
    }

    int number(String key, int otherwise) {
        return has(key) ? json.get(key).getAsInt() : otherwise;
    }

    long large(String key, long otherwise) {
        return has(key) ? json.get(key).getAsLong() : otherwise;
    }

    boolean flag(String key) {
        return has(key) && json.get(key).getAsBoolean();
    }

    Map<String, String> texts(String key) {
        Map<String, String> found = new LinkedHashMap<>();
        if (has(key)) {
            for (Map.Entry<String, JsonElement> entry : json.getAsJsonObject(key).entrySet()) {
                found.put(entry.getKey(), entry.getValue().getAsString());
            }
        }
        return found;
    }

    JsonArray array(String key) {
        return has(key) ? json.getAsJsonArray(key) : new JsonArray();
    }

    List<Args> objects(String key) {
        List<Args> found = new ArrayList<>();
        if (has(key)) {
            JsonArray array = json.getAsJsonArray(key);
            for (JsonElement element : array) {
                found.add(new Args(element.getAsJsonObject()));
            }
        }
        return found;
    }
}
