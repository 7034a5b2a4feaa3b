"""Keys that RocketMQ's broker has and this one ignores. Each one in a configuration file is reported with the reason.

INERT keys have no effect because there is nothing to tune here (one event loop instead of thread pools, other locks):
they get a note. UNSUPPORTED keys belong to features that do not exist here (yet): they get a warning, and a request
that sets one is refused, except with the value in HARMLESS.
"""

from typing import Final


def _table(*groups: tuple[str, str]) -> dict[str, str]:
    return {key: why for why, keys in groups for key in keys.split()}


INERT: Final = _table(
    ("topics longer than 127 bytes are always stored with the record version for them", "autoMessageVersionOnTopicLen"),
    ("a deleted file is unlinked immediately", "redeleteHangedFileInterval"),
    ("the index is always completed after an abnormal exit", "messageIndexSafe"),
    (
        "there are no thread pools; requests run in one event loop",
        """
        sendMessageThreadPoolNums putMessageFutureThreadPoolNums pullMessageThreadPoolNums
        litePullMessageThreadPoolNums ackMessageThreadPoolNums processReplyMessageThreadPoolNums
        queryMessageThreadPoolNums adminBrokerThreadPoolNums clientManageThreadPoolNums
        consumerManageThreadPoolNums loadBalanceProcessorThreadPoolNums heartbeatThreadPoolNums
        recoverThreadPoolNums endTransactionThreadPoolNums sendThreadPoolQueueCapacity
        putThreadPoolQueueCapacity pullThreadPoolQueueCapacity litePullThreadPoolQueueCapacity
        ackThreadPoolQueueCapacity replyThreadPoolQueueCapacity queryThreadPoolQueueCapacity
        clientManagerThreadPoolQueueCapacity consumerManagerThreadPoolQueueCapacity
        heartbeatThreadPoolQueueCapacity endTransactionPoolQueueCapacity adminBrokerThreadPoolQueueCapacity
        loadBalanceThreadPoolQueueCapacity asyncSendEnable recoverConcurrently serverWorkerThreads
        serverCallbackExecutorThreads serverSelectorThreads serverOnewaySemaphoreValue
        serverAsyncSemaphoreValue serverNettyWorkerGroupEnable serverPooledByteBufAllocatorEnable
        useEpollNativeSelector clientWorkerThreads clientCallbackExecutorThreads disableCallbackExecutor
        disableNettyWorkerGroup batchDispatchRequestThreadPoolNums enableFastChannelEventProcess
        """,
    ),
    (
        "there is no queue in front of the handlers; maxRequestsInFlight is the limit",
        """
        brokerFastFailureEnable waitTimeMillsInSendQueue waitTimeMillsInPullQueue
        waitTimeMillsInLitePullQueue waitTimeMillsInHeartbeatQueue waitTimeMillsInTransactionQueue
        waitTimeMillsInAckQueue waitTimeMillsInAdminBrokerQueue maxAsyncPutMessageRequests
        """,
    ),
    (
        "appends need no lock of this kind",
        """
        useReentrantLockWhenPutMessage useABSLock spinLockCollisionRetreatOptimalDegree topicQueueLockNum
        debugLockEnable
        """,
    ),
    (
        "a reply to a pull is a copy while it is small, and views of the mapped files beyond that",
        """
        transferMsgByHeap enableNetWorkFlowControl
        """,
    ),
    (
        "messages are dispatched in the same turn of the event loop that stores them",
        """
        enableAsyncReput dispatchFromSenderThread dispatchCqThreads dispatchCqCacheNum
        enableBuildConsumeQueueConcurrently recheckReputOffsetFromCq putMsgIndexHightWater
        """,
    ),
    (
        "files are prepared ahead of the writer by other means",
        """
        flushLeastPagesWhenWarmMapedFile writeWithoutMmap mappedFileSwapEnable
        commitLogForceSwapMapInterval commitLogSwapMapInterval commitLogSwapMapReserveFileNum
        logicQueueForceSwapMapInterval logicQueueSwapMapInterval cleanSwapedMapInterval
        logicQueueSwapMapReserveFileNum putConsumeQueueDataByFileChannel dataReadAheadEnable
        searchBcqByCacheEnable sampleSteps sampleCountThreshold maxConsumeQueueScan
        """,
    ),
    (
        "RocketMQ does not use it either",
        """
        putMessageTimeout maxRecoveryCommitlogFiles maxTopicLength highSpeedMode commercialBaseCount
        commercialSizePerMsg bitMapLengthConsumeQueueExt timerInterceptDelayLevel
        """,
    ),
    (
        "whether a message wakes the flush or commit service depends on flushCommitLogTimed only",
        """
        wakeCommitWhenPutMessage wakeFlushWhenPutMessage
        """,
    ),
    (
        "statistics are always on; each one costs a plain counter",
        """
        accountStatsEnable accountStatsPrintZeroValues maxStatsIdleTimeInMinutes enableDetailStat
        autoDeleteUnusedStats enableScheduleMessageStats enableLmqStats
        """,
    ),
    (
        "one task moves timed messages, and it needs no threads, queues or warm-up",
        """
        timerGetMessageThreadNum timerPutMessageThreadNum timerEnableDisruptor timerWarmEnable
        timerProgressLogIntervalMs
        """,
    ),
    ("a timed message is delivered again until the store takes it", "timerEnableRetryUntilSuccess"),
    (
        "the counts of timed messages are compared with the timer's log at each start",
        """
        timerEnableCheckMetrics timerCheckMetricsWhen timerMetricSmallThreshold
        """,
    ),
    (
        "the broker does not depend on its installation directory",
        """
        rocketmqHome isolateLogEnable
        """,
    ),
    (
        "a registration is never split into parts",
        """
        enableSplitRegistration splitRegistrationSize enableSingleTopicRegister enableSplitMetadata
        splitMetadataSize compatibleWithOldNameSrv
        """,
    ),
)

_REPLICATION = "replication is by masters and slaves that an operator appoints; this option belongs to another kind"
_POP = "POP consumption is not implemented yet"
_FILTER = "the consume queue extension is not written; an expression is evaluated on each message's properties"
_TRANSACTIONS = "halves are kept in the queue, and their number is a metric that is not stored in a file"
_TIMER = "timed messages wait in the timer wheel and its log; RocketMQ's other ways to keep them are not supported"
_TIMER_ROCKSDB = "there are no timers in RocksDB; timed messages wait in the timer wheel and its log"
_TRANSACTIONS_ROCKSDB = "there are no transactions in RocksDB; halves wait in the queue of the half topic"
_ACTING_MASTER = "no slave becomes the acting master"
_ROCKSDB = "RocksDB is not supported; queues are files"
_METRICS = "metrics are exported for Prometheus, all or none: metricsExporterType=PROM"
_CONTROLLER = "controllerAddr lists the controllers; a process runs one broker"
_SCHEDULE = "the messages of a delay level are always delivered one after the other"

UNSUPPORTED: Final = _table(
    (
        _REPLICATION,
        """
        haSlaveFallbehindMax offsetCheckInSlave duplicationEnable totalReplicas haFlowControlEnable
        maxHaTransferByteInSecond syncMasterFlushOffsetWhenStartup maxChecksumRange
        maxSlaveResendLength syncFromLastFile sendHeartbeatTimeoutMillis
        brokerNotActiveTimeoutMillis
        skipPreOnline syncBrokerMemberGroupPeriod forwardTimeout lockInStrictMode readUnCommitted
        enableDLegerCommitLog dLegerGroup dLegerPeers dLegerSelfId preferredLeaderId enableBatchPush
        storePathDLedgerCommitLog cleanOfflineBrokerInterval
        """,
    ),
    (_ACTING_MASTER, "enableSlaveActingMaster enableRemoteEscape"),
    (
        _CONTROLLER,
        """
        fetchControllerAddrByDnsLookup isBrokerContainer isInBrokerContainer
        """,
    ),
    (
        _POP,
        """
        popPollingSize popPollingMapSize popPollingMapExpireTimeSeconds maxPopPollingSize reviveQueueNum
        reviveInterval reviveMaxSlow reviveScanTime enableSkipLongAwaitingAck reviveAckWaitMs enablePopLog
        enablePopBufferMerge popCkStayBufferTime popCkStayBufferTimeOut popCkMaxBufferSize
        popCkOffsetMaxQueueSize enablePopBatchAck popLongPollingForceNotifyInterval
        enableNotifyBeforePopCalculateLag enableNotifyAfterPopOrderLockRelease initPopOffsetByCheckMsgInMem
        retrieveMessageFromPopRetryTopicV1 enableRetryTopicV2 popFromRetryProbability
        popConsumerFSServiceInit popConsumerKVServiceLog popConsumerKVServiceInit popConsumerKVServiceEnable
        popReviveMaxReturnSizePerRead popReviveMaxAttemptTimes popResponseReturnActualRetryTopic
        popInflightMessageThreshold enablePopMessageThreshold skipWhenCKRePutReachMaxTimes
        clearRetryTopicWhenDeleteTopic appendAckAsync
        appendCkAsync defaultMessageRequestMode defaultPopShareQueueNum
        pullBatchMaxMessageCount
        """,
    ),
    (
        _FILTER,
        """
        enableCalcFilterBitMap expectConsumerNumUseFilter maxErrorRateOfBloomFilter enableConsumeQueueExt
        mappedFileSizeConsumeQueueExt
        """,
    ),
    (_TRANSACTIONS, "transactionMetricFlushInterval"),
    (_TRANSACTIONS_ROCKSDB, "transRocksDBEnable"),
    (_TIMER, "disappearTimeAfterStart timerColdDataCheckIntervalMs"),
    (_TIMER_ROCKSDB, "timerRocksDBEnable"),
    (
        _ROCKSDB,
        """
        storeType rocksdbCQDoubleWriteEnable cleanRocksDBDirtyCQIntervalMin statRocksDBCQIntervalSec
        memTableFlushIntervalMs realTimePersistRocksDBConfig enableRocksDBLog combineCQLoadingCQTypes
        combineCQPreferCQType combineAssignOffsetCQType combineCQEnableCheckSelf
        combineCQMaxExtraSearchCommitLogFiles bottomMostCompressionTypeForConsumeQueueStore
        rocksdbCompressionType rocksdbFlushWalFrequency rocksdbWalFileRollingThreshold configManagerVersion
        useSeparateStorePathForRocksdbCQ indexRocksDBEnable
        """,
    ),
    ("the mode is the value of tls.server.mode", "tlsMode"),
    (
        _METRICS,
        """
        metricsGrpcExporterTarget metricsGrpcExporterHeader
        metricGrpcExporterTimeOutInMills metricGrpcExporterIntervalInMills
        metricLoggingExporterIntervalInMills metricsLabel
        metricsInDelta enableRemotingMetrics enableMessageStoreMetrics enablePopMetrics
        enableConnectionMetrics enableTransactionMetrics enableStatsMetrics enableRequestMetrics
        enableLagAndDlqMetrics estimateAccumulation
        """,
    ),
    (
        "the commit log is always in one directory",
        """
        readOnlyCommitLogStorePaths replicasPerDiskPartition logicalDiskSpaceCleanForciblyThreshold
        """,
    ),
    (
        "the checksum over properties is not written",
        """
        enabledAppendPropCRC forceVerifyPropCRC
        """,
    ),
    (
        "inner batches, light queues and multi-dispatch are not implemented yet",
        """
        mapperFileSizeBatchConsumeQueue enableLmq enableMultiDispatch maxLmqConsumeQueueNum
        """,
    ),
    (
        "compacted topics are not implemented yet",
        """
        enableCompaction compactionMappedFileSize compactionCqMappedFileSize compactionScheduleInternal
        maxOffsetMapSize compactionThreadNum
        """,
    ),
    (
        "the tier is not kept in an object store yet",
        """
        objectStoreEndpoint objectStoreBucket objectStoreAccessKey objectStoreSecretKey
        """,
    ),
    (
        "flow control of cold reads is not supported",
        """
        coldCtrStrategyEnable usePIDColdCtrStrategy cgColdReadThreshold globalColdReadThreshold
        coldDataFlowControlEnable coldDataScanEnable accessMessageInMemoryHotRatio
        """,
    ),
    (
        "name servers are set by namesrvAddr only",
        """
        fetchNameSrvAddrByDnsLookup fetchNamesrvAddrByAddressServer fetchNamesrvAddrInterval
        updateNameServerAddrPeriod
        """,
    ),
    (
        "a consumer that lags is served like any other",
        """
        disableConsumeIfConsumerReadSlowly consumerFallbehindThreshold
        """,
    ),
    (
        _SCHEDULE,
        """
        enableScheduleAsyncDeliver scheduleAsyncDeliverMaxPendingLimit
        scheduleAsyncDeliverMaxResendNum2Blocked
        """,
    ),
    (
        "offsets of broadcast groups are stored by the clients",
        """
        enableBroadcastOffsetStore broadcastOffsetExpireSecond broadcastOffsetExpireMaxSecond
        """,
    ),
    (
        "not implemented (yet)",
        """
        rejectPullConsumerEnable flushConsumerOffsetHistoryInterval enableMixedMessageType printChannelGroups
        printChannelGroupsMinNum useStaticSubscription subscriptionExpiredTimeout
        realTimeNotifyConsumerChange enableCleanExpiredOffset enableRunningFlagsInFlush
        maxBatchDeleteFilesNum correctLogicMinOffsetSleepInterval correctLogicMinOffsetForceInterval
        travelCqFileNumWhenGetMessage diskFallRecorded enableAcceleratedRecovery
        enableLogConsumeQueueRepeatedlyBuildWhenRecover enableShutdownGracefully commitLogRecoverMaxNum
        checkCommitLogOffsetOnRecover indexFileWriteEnable indexFileReadEnable clientOnewaySemaphoreValue
        clientAsyncSemaphoreValue connectTimeoutMillis channelNotActiveInterval isScanAvailableNameSrv
        clientChannelMaxIdleTimeSeconds clientSocketSndBufSize clientSocketRcvBufSize
        clientPooledByteBufAllocatorEnable clientCloseSocketIfTimeout socksProxyConfig
        maxReconnectIntervalTimeSeconds enableReconnectForGoAway
        """,
    ),
)

HARMLESS: Final = {
    key: value
    for value, keys in (
        ("default", "storeType"),
        ("1", "totalReplicas"),
        ("true", "indexFileWriteEnable indexFileReadEnable"),
        (
            "false",
            """
            appendAckAsync appendCkAsync checkCommitLogOffsetOnRecover clientPooledByteBufAllocatorEnable
            coldCtrStrategyEnable coldDataFlowControlEnable coldDataScanEnable combineCQEnableCheckSelf
            disableConsumeIfConsumerReadSlowly duplicationEnable enableAcceleratedRecovery
            enableBatchPush enableCalcFilterBitMap enableCleanExpiredOffset enableConsumeQueueExt
            enableDLegerCommitLog enableLmq enableLogConsumeQueueRepeatedlyBuildWhenRecover
            enableMixedMessageType enableMultiDispatch enablePopBatchAck enablePopBufferMerge enablePopLog
            enablePopMessageThreshold enableRemoteEscape enableRetryTopicV2 enableRocksDBLog
            enableRunningFlagsInFlush enableScheduleAsyncDeliver enableShutdownGracefully enableSkipLongAwaitingAck
            enableSlaveActingMaster enabledAppendPropCRC fetchControllerAddrByDnsLookup fetchNameSrvAddrByDnsLookup
            fetchNamesrvAddrByAddressServer forceVerifyPropCRC haFlowControlEnable indexRocksDBEnable
            isBrokerContainer isInBrokerContainer lockInStrictMode metricsInDelta
            offsetCheckInSlave popConsumerKVServiceEnable popConsumerKVServiceInit popConsumerKVServiceLog
            popResponseReturnActualRetryTopic printChannelGroups readUnCommitted rejectPullConsumerEnable
            rocksdbCQDoubleWriteEnable skipPreOnline skipWhenCKRePutReachMaxTimes syncFromLastFile
            syncMasterFlushOffsetWhenStartup timerRocksDBEnable transRocksDBEnable useSeparateStorePathForRocksdbCQ
            useStaticSubscription
            """,
        ),
    )
    for key in keys.split()
}
"""RocketMQ's defaults of UNSUPPORTED keys, if it then behaves as this broker: mostly switches of features."""
