package partners;

import com.google.gson.JsonArray;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.Map;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Calls of the administration client for which mqadmin has no command. */
final class Admins {
    void addTo(Map<String, Driver.Operation> operations) {
        operations.put("admin.call", Admins::call);
    }

    private static Object call(Args args) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(Security.hook(args));
        Security.secure(admin, args);
        admin.setNamesrvAddr(args.text("namesrv"));
        admin.setInstanceName(args.text("name"));
        admin.setVipChannelEnabled(false);
        admin.start();
        try {
            return call(admin, args.text("method"), args.array("arguments"));
        } catch (InvocationTargetException failure) {
            if (failure.getCause() instanceof Exception) {
                throw (Exception) failure.getCause();
            }
            throw failure;
        } finally {
            admin.shutdown();
        }
    }

    private static Object call(DefaultMQAdminExt admin, String name, JsonArray given) throws Exception {
        for (Method method : DefaultMQAdminExt.class.getMethods()) {
            if (method.getName().equals(name) && method.getParameterCount() == given.size()) {
                Object[] arguments = new Object[given.size()];
                for (int i = 0; i < arguments.length; i++) {
                    arguments[i] = Driver.GSON.fromJson(given.get(i), method.getParameterTypes()[i]);
                }
                return method.invoke(admin, arguments);
            }
        }
        throw new IllegalArgumentException("no method " + name + " with " + given.size() + " arguments");
    }
}
