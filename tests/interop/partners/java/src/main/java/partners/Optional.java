package partners;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;

/** Calls of methods that only some versions of the client have. */
final class Optional {
    private Optional() {
    }

    static Object call(Object target, String name, Class<?> type, Object argument) throws Exception {
        return invoke(target, target.getClass().getMethod(name, type), argument);
    }

    static Object call(Object target, String name, String first, String second) throws Exception {
        return invoke(target, target.getClass().getMethod(name, String.class, String.class), first, second);
    }

    /** The value of a getter, or null if this version of the client does not have it. */
    static Object get(Object target, String name) {
        try {
            return target.getClass().getMethod(name).invoke(target);
        } catch (ReflectiveOperationException missing) {
            return null;
        }
    }

    private static Object invoke(Object target, Method method, Object... arguments) throws Exception {
        try {
            return method.invoke(target, arguments);
        } catch (InvocationTargetException failure) {
            if (failure.getCause() instanceof Exception) {
                throw (Exception) failure.getCause();
            }
            throw failure;
        }
    }
}
