from trimq.broker.store.stats import StoreStats

NOW = 1_700_000_000_000


def test_the_keys_that_mqadmin_shows() -> None:
    info = StoreStats(NOW).runtime_info(NOW + 90_061_000)
    assert info["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert info["bootTimestamp"] == str(NOW)
    assert info["putTps"] == "0 0 0"
    assert info["putMessageAverageSize"] == "0.0"
    assert set(info) == {
        "bootTimestamp",
        "runtime",
        "putMessageEntireTimeMax",
        "putMessageTimesTotal",
        "putMessageFailedTimes",
        "putMessageSizeTotal",
        "putMessageDistributeTime",
        "putMessageAverageSize",
        "dispatchMaxBuffer",
        "getMessageEntireTimeMax",
        "putTps",
        "getFoundTps",
        "getMissTps",
        "getTotalTps",
        "getTransferredTps",
        "putLatency99",
        "putLatency999",
    }


def test_rates_over_ten_sixty_and_six_hundred_seconds() -> None:
    stats = StoreStats(NOW)
    for second in range(701):
        stats.sample(float(second))
        stats.put_message_times_total += 100 if second < 690 else 10
        stats.found_times_total += 2
        stats.missed_times_total += 1
        stats.transferred_messages_total += 64
    info = stats.runtime_info(NOW)
    assert info["putTps"] == "10 85 98.5"
    assert (info["getFoundTps"], info["getMissTps"], info["getTotalTps"]) == ("2 2 2", "1 1 1", "3 3 3")
    assert info["getTransferredTps"] == "64 64 64"


def test_times_of_puts() -> None:
    stats = StoreStats(NOW)
    stats.put_message_times_total = 1000
    stats.put_message_size_total = 500_000
    for elapsed in [5] * 10 + [50, 51, 100, 700, 20_000]:
        stats.put_took(elapsed)
    info = stats.runtime_info(NOW)
    assert info["putMessageAverageSize"] == "500.0"
    assert info["putMessageEntireTimeMax"] == "20000"
    assert info["putMessageDistributeTime"] == (
        "[<=0ms]:985 [0~10ms]:10 [10~50ms]:1 [50~100ms]:2 [100~200ms]:0 [200~500ms]:0 [500ms~1s]:1 [1~2s]:0 "
        "[2~3s]:0 [3~4s]:0 [4~5s]:0 [5~10s]:0 [10s~]:1 "
    )
    assert (info["putLatency99"], info["putLatency999"]) == ("5.00", "700.00")
