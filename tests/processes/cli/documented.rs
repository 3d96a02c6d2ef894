//! What docs/protocol.md shows.

use super::*;

#[test]
fn the_documented_client_runs() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]);
    let page = protocol_page();
    let client = blocks(&page, "python")[0];
    let Some(python) = installed("python3") else { return eprintln!("skipped: no python3 here") };
    let ran = Ran::of(&mut machine.command(&python, &["-c", client, &engine.pid().to_string()]));
    ran.has(0, "'reply': 'done'", "");
    assert!(matches!(engine.asked()[..], [Request::Pause(PauseRequest { hold: Some(TEN_SECONDS), .. })]));

    let base = machine.folder.path();
    fs::rename(machine.sockets(), base.join("vramctl")).unwrap();
    let mut command = machine.command(&python, &["-c", client, &engine.pid().to_string()]);
    command.env_remove("VRAMCTL_DIR").env("XDG_RUNTIME_DIR", base);
    Ran::of(&mut command).expect(0, "'reply': 'done'", "");
}

/// Every example line in the page parses, and contains no unknown field.
#[test]
fn the_documented_messages_match_the_code() {
    let page = protocol_page();
    let mut seen = 0;
    for line in blocks(&page, "json").iter().flat_map(|block| block.lines()).filter(|line| !line.is_empty()) {
        let documented: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let understood = if documented.get("request").is_some() {
            let request = protocol::parse(line.as_bytes()).unwrap_or_else(|error| panic!("{error}: {line}"));
            serde_json::to_value(protocol::Message { version: protocol::VERSION, request }).unwrap()
        } else {
            serde_json::to_value(serde_json::from_str::<Reply>(line).unwrap_or_else(|error| panic!("{error}: {line}"))).unwrap()
        };
        assert_eq!(documented, understood, "{line}");
        seen += 1;
    }
    assert!(seen >= 10, "only {seen} messages were found: is this test still looking?");
}
