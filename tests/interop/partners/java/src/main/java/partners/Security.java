package partners;

import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.remoting.RPCHook;

/** Credentials and TLS of one client. Certificates and the default for TLS are the JVM's: -Dtls.enable and its kin. */
final class Security {
    private Security() {
    }

    /** The hook that signs each request of a client with accessKey and secretKey; null without these. */
    static RPCHook hook(Args args) {
        if (!args.has("accessKey")) {
            return null;
        }
        return new AclClientRPCHook(new SessionCredentials(args.text("accessKey"), args.text("secretKey")));
    }

    /** Switches TLS on or off for one client, if the test says so. */
    static void secure(ClientConfig client, Args args) {
        if (args.has("tls")) {
            client.setUseTLS(args.flag("tls"));
        }
    }
}
