"""Administration of name servers."""

from trimq.client.admin.base import AdminBase, each, properties_of, text_of
from trimq.client.errors import RocketMQError
from trimq.protocol.body import KVTable, decode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.headers.namesrv import (
    AddWritePermResponseHeader,
    GetKVConfigResponseHeader,
    GetKVListByNamespaceRequestHeader,
    KVConfigRequestHeader,
    PutKVConfigRequestHeader,
    WipeWritePermResponseHeader,
    WritePermRequestHeader,
)


class NameServerAdmin(AdminBase):
    """Name servers. They do not replicate to each other, so each change is sent to all of them."""

    async def namesrv_config(self) -> dict[str, dict[str, str]]:
        """The configuration of each name server, by address.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return sorted(await admin.namesrv_config())
        """

        async def ask(address: str) -> dict[str, str]:
            return properties_of((await self.client.request(address, RequestCode.GET_NAMESRV_CONFIG, {})).body)

        return await each(self.client.name_servers.addresses, ask)

    async def update_namesrv_config(self, changes: dict[str, str]) -> None:
        """Changes the configuration of all name servers at run time.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.update_namesrv_config({"orderMessageEnable": "true"})
        """
        for address in self.client.name_servers.addresses:
            await self.client.request(address, RequestCode.UPDATE_NAMESRV_CONFIG, {}, text_of(changes))

    async def wipe_write_perm(self, broker_name: str) -> dict[str, int]:
        """Removes a broker's write permission from all routes, so that clients stop sending to it.

        Returns the number of changed topics by name server.

        >>> async def before_maintenance(admin: "Admin") -> None:
        ...     await admin.wipe_write_perm("broker-a")
        """

        async def ask(address: str) -> int:
            header = WritePermRequestHeader(broker_name=broker_name)
            reply = await self.client.request(address, RequestCode.WIPE_WRITE_PERM_OF_BROKER, header)
            return reply.header(WipeWritePermResponseHeader).wipe_topic_count

        return await each(self.client.name_servers.addresses, ask)

    async def add_write_perm(self, broker_name: str) -> dict[str, int]:
        """Restores a broker's write permission after ``wipe_write_perm``; returns the changed topics by name server.

        >>> async def after_maintenance(admin: "Admin") -> None:
        ...     await admin.add_write_perm("broker-a")
        """

        async def ask(address: str) -> int:
            header = WritePermRequestHeader(broker_name=broker_name)
            reply = await self.client.request(address, RequestCode.ADD_WRITE_PERM_OF_BROKER, header)
            return reply.header(AddWritePermResponseHeader).add_topic_count

        return await each(self.client.name_servers.addresses, ask)

    async def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Stores a value for a key of a namespace at all name servers.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.put_kv("ORDER_TOPIC_CONFIG", "Orders", "broker-a:4")
        """
        header = PutKVConfigRequestHeader(namespace=namespace, key=key, value=value)
        for address in self.client.name_servers.addresses:
            await self.client.request(address, RequestCode.PUT_KV_CONFIG, header)

    async def get_kv(self, namespace: str, key: str) -> str | None:
        """The value of a key; None if there is none.

        >>> async def example(admin: "Admin") -> str | None:
        ...     return await admin.get_kv("ORDER_TOPIC_CONFIG", "Orders")
        """
        header = KVConfigRequestHeader(namespace=namespace, key=key)
        try:
            reply = await self.client.ask_name_server(RequestCode.GET_KV_CONFIG, header)
        except RocketMQError as error:
            if error.code == ResponseCode.QUERY_NOT_FOUND:
                return None
            raise
        return reply.header(GetKVConfigResponseHeader).value

    async def delete_kv(self, namespace: str, key: str) -> None:
        """Deletes a key of a namespace at all name servers.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.delete_kv("ORDER_TOPIC_CONFIG", "Orders")
        """
        header = KVConfigRequestHeader(namespace=namespace, key=key)
        for address in self.client.name_servers.addresses:
            await self.client.request(address, RequestCode.DELETE_KV_CONFIG, header)

    async def list_kv(self, namespace: str) -> dict[str, str]:
        """All keys and values of a namespace; empty if it does not exist.

        >>> async def example(admin: "Admin") -> dict[str, str]:
        ...     return await admin.list_kv("ORDER_TOPIC_CONFIG")
        """
        header = GetKVListByNamespaceRequestHeader(namespace=namespace)
        try:
            reply = await self.client.ask_name_server(RequestCode.GET_KVLIST_BY_NAMESPACE, header)
        except RocketMQError as error:
            if error.code == ResponseCode.QUERY_NOT_FOUND:
                return {}
            raise
        return decode_json(reply.body, KVTable).table
