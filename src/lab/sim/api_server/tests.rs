//! The simulated API server itself: its rules, without a client of this program.

use super::access::{Bound, Verb};
use super::store::Store;
use super::target::Target;
use super::*;
use std::collections::BTreeSet;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

fn slice(name: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": name },
        "spec": {
            "driver": "holdfast.dev", "nodeName": "n1",
            "pool": { "name": "n1/gpu", "generation": 0, "resourceSliceCount": 1 },
            "devices": [{
                "name": "gpu-0",
                "attributes": { "model": { "string": "" }, "holdfast.dev/v": { "version": "1.2.3" } },
                "capacity": { "memory": { "value": "1024Mi" } },
            }],
        },
    })
}

fn target(name: Option<&str>) -> Target {
    let name = name.map(str::to_owned);
    Target { kind: Kind::ResourceSlice, namespace: String::new(), name, is_status: false }
}

/// The reasons and fields for which an API server of this version refuses a changed slice.
fn causes(profile: Profile, change: impl FnOnce(&mut Value)) -> Vec<(String, String)> {
    let mut object = slice("a");
    change(&mut object["spec"]);
    match Store::new().create(&target(None), object, profile) {
        Ok(_) => Vec::new(),
        Err(refusal) if refusal.code == 422 => {
            let cause = |cause: &refusal::Cause| (cause.reason.to_owned(), cause.field.clone());
            refusal.causes.iter().map(cause).collect()
        }
        Err(refusal) => vec![(refusal.code.to_string(), refusal.message)],
    }
}

/// Sets the value at a path such as `devices/0/name`, with all that is missing on the way.
fn set(spec: &mut Value, path: &str, value: Value) {
    let mut place = spec;
    for part in path.split('/') {
        place = match part.parse::<usize>() {
            Ok(index) => {
                if !place.is_array() {
                    *place = json!([]);
                }
                let list = place.as_array_mut().unwrap();
                list.resize_with(list.len().max(index + 1), || json!({}));
                &mut list[index]
            }
            Err(_) => &mut place[part],
        };
    }
    *place = value;
}

/// Changes of a slice that break one rule: the path, the value as JSON, the reason, and the field.
/// `LONG` is 64 letters.
const RULES: &[(&str, &str, &str, &str)] = &[
    ("driver", r#""Holdfast.dev""#, "Invalid", "driver"),
    ("driver", r#""""#, "Required", "driver"),
    ("driver", r#""LONG""#, "TooLong", "driver"),
    ("pool/name", r#""n1//gpu""#, "Invalid", "pool.name"),
    ("pool/name", r#""""#, "Required", "pool.name"),
    ("pool/generation", "-1", "Invalid", "pool.generation"),
    ("pool/resourceSliceCount", "0", "Invalid", "pool.resourceSliceCount"),
    ("nodeName", r#""N1""#, "Invalid", "nodeName"),
    ("nodeName", "null", "Required", ""),
    ("allNodes", "true", "Invalid", ""),
    ("devices/0/name", r#""GPU-0""#, "Invalid", "devices[0].name"),
    ("devices/0/name", r#""""#, "Required", "devices[0].name"),
    ("devices/0/name", r#""LONG""#, "Invalid", "devices[0].name"),
    ("devices/1/name", r#""gpu-0""#, "Duplicate", "devices[1].name"),
    ("devices/0/nodeName", r#""n1""#, "Invalid", "devices[0]"),
    ("devices/0/attributes/a-b", r#"{"int":1}"#, "Invalid", "devices[0].attributes[a-b]"),
    ("devices/0/attributes/m", "{}", "Required", "devices[0].attributes[m]"),
    ("devices/0/attributes/m", r#"{"int":1,"bool":false}"#, "Invalid", "devices[0].attributes[m]"),
    ("devices/0/attributes/m/string", r#""LONGx""#, "TooLong", "devices[0].attributes[m].string"),
    (
        "devices/0/attributes/m/version",
        r#""1.02.3""#,
        "Invalid",
        "devices[0].attributes[m].version",
    ),
    (
        "devices/0/capacity/c",
        r#"{"value":"1","requestPolicy":{"default":"1"}}"#,
        "Forbidden",
        "devices[0].capacity[c].requestPolicy",
    ),
    (
        "devices/0/taints/0",
        r#"{"key":"a","effect":"Evict"}"#,
        "NotSupported",
        "devices[0].taints[0].effect",
    ),
    ("devices/0/taints/0", r#"{"key":"a"}"#, "Required", "devices[0].taints[0].effect"),
    ("devices/0/taints/0", r#"{"effect":"None"}"#, "Required", "devices[0].taints[0].key"),
    (
        "devices/0/taints/0",
        r#"{"key":"a","value":"a b","effect":"NoSchedule"}"#,
        "Invalid",
        "devices[0].taints[0].value",
    ),
    ("devices/0/bindingConditions", r#"["a"]"#, "Invalid", "devices[0]"),
    (
        "devices/0/consumesCounters/0",
        r#"{"counterSet":"s","counters":{}}"#,
        "Required",
        "devices[0].consumesCounters[0].counters",
    ),
    ("sharedCounters/0", r#"{"name":"s","counters":{"c":{"value":"1"}}}"#, "Invalid", ""),
];

#[test]
fn every_rule_for_slices_refuses_with_its_field() {
    for (path, value, reason, field) in RULES {
        let value: Value = serde_json::from_str(&value.replace("LONG", &"a".repeat(64))).unwrap();
        let field = if field.is_empty() { "spec".to_owned() } else { format!("spec.{field}") };
        let found = causes(Profile::V1_36, |spec| set(spec, path, value.clone()));
        assert_eq!(found, [(format!("FieldValue{reason}"), field)], "{path}: {value}");
    }
    assert_eq!(causes(Profile::V1_36, |_| {}), []);
}

#[test]
fn every_list_of_a_slice_has_its_limit() {
    let map = |count: usize, value: Value| -> Value {
        let entries = (0..count).map(|n| (format!("a{n}"), value.clone()));
        Value::Object(entries.collect())
    };
    let list = |count: usize, name: &str, value: &Value| -> Value {
        let entry = |n| {
            let mut entry = value.clone();
            entry[name] = format!("a{n}").into();
            entry
        };
        (0..count).map(entry).collect()
    };
    let lists = Profile { lists: true, counters_apart: false, ..Profile::V1_36 };
    let counters = json!({ "counters": { "c": { "value": "1" } } });
    let texts = |count: usize| -> Value { (0..count).map(|n| format!("c{n}")).collect() };
    type Make<'a> = Box<dyn Fn(usize) -> Value + 'a>;
    let limits: Vec<(&str, &str, usize, Make<'_>)> = vec![
        // The slice has a capacity too.
        ("devices/0/attributes", "", 31, Box::new(|n| map(n, json!({ "int": 1 })))),
        ("devices/0/attributes/l/ints", "", 45, Box::new(|n| (0..n).collect())),
        (
            "devices/0/taints",
            ".taints",
            16,
            Box::new(|n| list(n, "key", &json!({ "effect": "NoSchedule" }))),
        ),
        (
            "devices/0/consumesCounters",
            ".consumesCounters",
            2,
            Box::new(|n| list(n, "counterSet", &counters)),
        ),
        (
            "devices/0/consumesCounters/0",
            ".consumesCounters[0].counters",
            32,
            Box::new(|n| json!({ "counterSet": "s", "counters": map(n, json!({ "value": "1" })) })),
        ),
        ("sharedCounters", "spec.sharedCounters", 8, Box::new(|n| list(n, "name", &counters))),
    ];
    for (path, field, max, make) in limits {
        let field = if field.starts_with("spec") {
            field.into()
        } else {
            format!("spec.devices[0]{field}")
        };
        assert_eq!(causes(lists, |spec| set(spec, path, make(max))), [], "{path}");
        let found = causes(lists, |spec| set(spec, path, make(max + 1)));
        assert_eq!(found, [("FieldValueTooMany".to_owned(), field)], "{path}");
    }
    let found = causes(lists, |spec| {
        set(spec, "devices/0/bindingConditions", texts(5));
        set(spec, "devices/0/bindingFailureConditions", json!(["f"]));
    });
    let field = "spec.devices[0].bindingConditions".to_owned();
    assert_eq!(found, [("FieldValueTooMany".to_owned(), field)]);
}

#[test]
fn a_policy_for_requests_is_checked_against_its_capacity() {
    let at = "spec.devices[0].capacity[c].requestPolicy";
    for (policy, expected) in [
        (r#"{"default":"1Gi"}"#, None),
        (r#"{"default":"2Gi"}"#, Some(".default")),
        (r#"{"default":"1","validValues":["1","2"]}"#, None),
        (r#"{"default":"3","validValues":["1","2"]}"#, Some(".default")),
        (r#"{"default":"1","validValues":["2","1"]}"#, Some(".validValues")),
        (r#"{"default":"1","validRange":{"min":"1","max":"1Gi","step":"1"}}"#, None),
        (r#"{"default":"1","validRange":{"min":"2","max":"1Gi"}}"#, Some(".validRange")),
        (r#"{"default":"1","validRange":{"min":"1","step":"0"}}"#, Some(".validRange.step")),
    ] {
        let policy: Value = serde_json::from_str(policy).unwrap();
        let found = causes(Profile::V1_36, |spec| {
            set(spec, "devices/0/allowMultipleAllocations", json!(true));
            set(spec, "devices/0/capacity/c", json!({ "value": "1Gi", "requestPolicy": policy }));
        });
        let expected = expected.map(|end| ("FieldValueInvalid".to_owned(), format!("{at}{end}")));
        assert_eq!(found, Vec::from_iter(expected), "{policy}");
    }
}

#[test]
fn a_slice_has_half_as_many_devices_if_one_has_a_taint() {
    let devices = |count: usize, is_tainted: bool| {
        let device = |n| json!({ "name": format!("d{n}") });
        let mut devices: Vec<Value> = (0..count).map(device).collect();
        if is_tainted {
            devices[0]["taints"] = json!([{ "key": "a", "effect": "NoSchedule" }]);
        }
        Value::from(devices)
    };
    for (count, is_tainted, is_accepted) in
        [(128, false, true), (129, false, false), (64, true, true), (65, true, false)]
    {
        let found = causes(Profile::V1_36, |spec| set(spec, "devices", devices(count, is_tainted)));
        let expected = ("FieldValueTooMany".to_owned(), "spec.devices".to_owned());
        let expected = if is_accepted { vec![] } else { vec![expected] };
        assert_eq!(found, expected, "{count} {is_tainted}");
    }
    // With the gate off the taint is dropped before the rule applies.
    assert_eq!(causes(Profile::V1_34, |spec| set(spec, "devices", devices(65, true))), []);
}

#[test]
fn an_unknown_field_and_a_wrong_type_are_refused_as_malformed() {
    for (path, value) in [
        ("devices/0/taint", json!([])),
        ("nodename", json!("n1")),
        ("devices/0/name", json!(1)),
        ("devices/0/capacity/c/value", json!("80 GB")),
        ("sharedCounters/0/counters/c/value", json!("")),
    ] {
        let found = causes(Profile::V1_36, |spec| set(spec, path, value));
        assert_eq!(found[0].0, "400", "{path}: {found:?}");
    }
}

#[test]
fn fields_behind_a_gate_that_is_off_are_dropped_without_an_error() {
    let mut object = slice("a");
    let device = &mut object["spec"]["devices"][0];
    device["taints"] = json!([{ "key": "a", "effect": "NoExecute" }]);
    device["consumesCounters"] =
        json!([{ "counterSet": "s", "counters": { "c": { "value": "1" } } }]);
    device["allowMultipleAllocations"] = json!(true);
    device["bindingConditions"] = json!(["a"]);
    device["bindingFailureConditions"] = json!(["b"]);
    let gated = ["taints", "consumesCounters", "allowMultipleAllocations", "bindingConditions"];
    for (profile, are_kept) in
        [(Profile::V1_34, false), (Profile::V1_35, false), (Profile::V1_36, true)]
    {
        let stored = Store::new().create(&target(None), object.clone(), profile).unwrap();
        let device = &stored["spec"]["devices"][0];
        for field in gated {
            assert_eq!(device.get(field).is_some(), are_kept, "{profile:?} {field}");
        }
        assert_eq!(device["name"], "gpu-0");
        assert_eq!(stored["spec"]["pool"]["generation"], 0);
        assert_eq!(device["capacity"]["memory"]["value"], "1Gi", "as the server writes it");
    }
    let stored = Store::new().create(&target(None), object, Profile::V1_36).unwrap();
    let time = stored["spec"]["devices"][0]["taints"][0]["timeAdded"].as_str().unwrap();
    assert!(time.parse::<jiff::Timestamp>().unwrap().subsec_nanosecond() == 0, "{time}");
    // A list whose values are dropped has no value: the whole slice is refused.
    let list = |spec: &mut Value| set(spec, "devices/0/attributes/l", json!({ "ints": [1, 2] }));
    let field = "spec.devices[0].attributes[l]".to_owned();
    assert_eq!(causes(Profile::V1_36, list), [("FieldValueRequired".to_owned(), field)]);
    assert_eq!(causes(Profile { lists: true, ..Profile::V1_36 }, list), []);
}

#[test]
fn a_dropped_field_raises_the_generation_each_time_it_is_sent() {
    let taints =
        json!([{ "key": "a", "effect": "NoSchedule", "timeAdded": "2026-01-02T03:04:05Z" }]);
    let (mut store, of_a) = (Store::new(), target(Some("a")));
    let mut sent = slice("a");
    sent["spec"]["devices"][0]["taints"] = taints.clone();
    let mut last = store.create(&target(None), sent.clone(), Profile::V1_34).unwrap();
    for generation in 2..4 {
        sent["metadata"] = last["metadata"].clone();
        let stored = store.replace(&of_a, sent.clone(), Profile::V1_34).unwrap();
        assert_eq!(stored["spec"], last["spec"]);
        assert_eq!(stored["metadata"]["generation"], generation);
        last = stored;
    }
    // A slice that has taints keeps them when the gate is turned off.
    sent["metadata"] = last["metadata"].clone();
    let stored = store.replace(&of_a, sent.clone(), Profile::V1_36).unwrap();
    assert_eq!(stored["spec"]["devices"][0]["taints"], taints);
    let stored = store.replace(&of_a, stored, Profile::V1_34).unwrap();
    assert_eq!(stored["spec"]["devices"][0]["taints"], taints);
}

#[test]
fn identity_never_changes_and_the_generation_follows_the_spec() {
    let (mut store, of_a) = (Store::new(), target(Some("a")));
    let created = store.create(&target(None), slice("a"), Profile::V1_36).unwrap();
    for (path, field) in
        [("driver", "driver"), ("pool/name", "pool.name"), ("nodeName", "nodeName")]
    {
        let mut object = created.clone();
        set(&mut object["spec"], path, json!("other"));
        let refusal = store.replace(&of_a, object, Profile::V1_36).unwrap_err();
        assert_eq!(refusal.causes[0].field, format!("spec.{field}"));
    }
    let mut labelled = created.clone();
    labelled["metadata"]["labels"] = json!({ "a": "1" });
    let labelled = store.replace(&of_a, labelled, Profile::V1_36).unwrap();
    assert_eq!(labelled["metadata"]["generation"], 1);
    // The same content is no change: no version, no event.
    let version = store.version();
    let same = store.replace(&of_a, labelled.clone(), Profile::V1_36).unwrap();
    assert_eq!((same, store.version()), (labelled.clone(), version));
    let mut changed = labelled.clone();
    set(&mut changed["spec"], "devices/0/name", json!("gpu-1"));
    let changed = store.replace(&of_a, changed, Profile::V1_36).unwrap();
    assert_eq!(changed["metadata"]["generation"], 2);
    assert_eq!(changed["metadata"]["uid"], created["metadata"]["uid"]);
    let mut blind = changed.clone();
    blind["metadata"]["resourceVersion"] = Value::Null;
    let refusal = store.replace(&of_a, blind, Profile::V1_36).unwrap_err();
    assert_eq!(refusal.causes[0].field, "metadata.resourceVersion");
    let mut another = changed.clone();
    another["metadata"]["uid"] = json!("another");
    assert_eq!(store.replace(&of_a, another, Profile::V1_36).unwrap_err().code, 409);
    assert_eq!(store.replace(&target(Some("b")), changed, Profile::V1_36).unwrap_err().code, 400);
}

#[test]
fn names_are_generated_and_an_object_with_a_version_is_not_created() {
    let mut store = Store::new();
    let mut object = slice("");
    object["metadata"]["generateName"] = json!("n1-");
    let mut names = BTreeSet::new();
    for _ in 0..10 {
        let created = store.create(&target(None), object.clone(), Profile::V1_36).unwrap();
        names.insert(created["metadata"]["name"].as_str().unwrap().to_owned());
    }
    assert_eq!(names.len(), 10);
    assert!(names.iter().all(|name| name.starts_with("n1-")), "{names:?}");
    object["metadata"]["resourceVersion"] = json!("1");
    assert_eq!(store.create(&target(None), object, Profile::V1_36).unwrap_err().code, 500);
    let refusal = store.create(&target(None), slice("A"), Profile::V1_36).unwrap_err();
    assert_eq!(refusal.causes[0].field, "metadata.name");
}

#[test]
fn an_object_with_a_finalizer_waits_for_it() {
    let mut store = Store::new();
    let claim = json!({ "metadata": { "namespace": "n", "name": "c", "finalizers": ["f"] } });
    store.put(Kind::ResourceClaim, claim);
    let target = Target {
        kind: Kind::ResourceClaim,
        namespace: "n".into(),
        name: Some("c".into()),
        is_status: false,
    };
    let mut waiting = store.delete(&target, &Value::Null).unwrap();
    assert!(waiting["metadata"]["deletionTimestamp"].is_string(), "{waiting}");
    assert!(store.get(Kind::ResourceClaim, "n", "c").is_some());
    waiting["metadata"]["finalizers"] = json!([]);
    store.replace(&target, waiting, Profile::V1_36).unwrap();
    assert_eq!(store.get(Kind::ResourceClaim, "n", "c"), None);
}

#[test]
fn a_kubelet_and_a_pod_only_reach_what_is_theirs() {
    let own = slice("a");
    let mut others = slice("b");
    others["spec"]["nodeName"] = json!("n2");
    let claim = Target {
        kind: Kind::ResourceClaim,
        namespace: "n".into(),
        name: Some("c".into()),
        is_status: false,
    };
    let bound: Bound = [("n1".to_owned(), "n".to_owned(), "c".to_owned())].into();
    let node = |name: &str| Target::of(&format!("/api/v1/nodes/{name}")).unwrap();
    let status = |name: &str| Target::of(&format!("/api/v1/nodes/{name}/status")).unwrap();
    let events = Target::of("/api/v1/namespaces/n/events").unwrap();
    let select = |text: &str| Selector::read(text, Kind::ResourceSlice).unwrap();
    let (none, mine) = (Selector::default(), select("spec.nodeName=n1"));
    let (a, all) = (target(Some("a")), target(None));
    let pods = Target::of("/api/v1/pods").unwrap();
    let of_pods = |text: &str| Selector::read(text, Kind::Pod).unwrap();
    for (verb, target, selector, old, by_kubelet, by_pod) in [
        (Verb::List, &all, &none, None, false, true),
        (Verb::List, &all, &mine, None, true, true),
        (Verb::Watch, &all, &select("spec.nodeName=n2"), None, false, true),
        (Verb::Watch, &all, &select("spec.nodeName!=n1"), None, false, true),
        (Verb::DeleteAll, &all, &mine, None, true, true),
        (Verb::Create, &all, &none, None, true, true),
        (Verb::Update, &a, &none, Some(&own), true, true),
        (Verb::Delete, &a, &none, Some(&others), false, true),
        (Verb::Get, &a, &none, None, false, true),
        (Verb::Get, &claim, &none, Some(&own), true, true),
        (Verb::Get, &claim, &none, None, false, true),
        (Verb::Update, &claim, &none, Some(&own), false, false),
        (Verb::Get, &node("n1"), &none, None, true, true),
        (Verb::Get, &node("n2"), &none, None, false, true),
        (Verb::Update, &node("n2"), &none, None, false, false),
        (Verb::List, &pods, &of_pods("spec.nodeName=n1"), None, true, false),
        (Verb::List, &pods, &of_pods("spec.nodeName=n2"), None, false, false),
        (Verb::List, &pods, &none, None, false, false),
        (Verb::Create, &pods, &none, None, false, false),
        (Verb::Patch, &status("n1"), &none, None, true, true),
        (Verb::Update, &status("n1"), &none, None, false, false),
        (Verb::Patch, &node("n1"), &none, None, false, false),
        (Verb::Create, &events, &none, None, true, true),
        (Verb::Patch, &events, &none, None, true, true),
        (Verb::List, &events, &none, None, false, false),
        (Verb::Delete, &events, &none, None, false, false),
    ] {
        for (user, expected) in [
            (User::Kubelet("n1".into()), by_kubelet),
            (User::Pod(None), by_pod),
            (User::Admin, true),
        ] {
            let found = user.authorize(verb, target, selector, old, &bound);
            assert_eq!(found.is_ok(), expected, "{user:?} {verb:?} {target:?} {found:?}");
        }
    }
    for (user, of_own, of_others) in [
        (User::Kubelet("n1".into()), true, false),
        (User::Pod(Some("n1".into())), true, false),
        (User::Pod(None), false, false),
        (User::Admin, true, true),
    ] {
        assert_eq!(user.admit(Verb::Create, &all, None, Some(&own)).is_ok(), of_own, "{user:?}");
        let found = user.admit(Verb::Delete, &a, Some(&others), None);
        assert_eq!(found.is_ok(), of_others, "{user:?}");
        for (name, expected) in [("n1", of_own), ("n2", of_others)] {
            let found = user.admit(Verb::Patch, &status(name), None, None);
            assert_eq!(found.is_ok(), expected, "{user:?} {name}");
        }
    }
}

/// Sends the head and the body of a request, and returns the code of the answer.
async fn code(server: &ApiServer, head: &str, body: &str) -> u16 {
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    let length = body.len();
    let request = format!("{head}\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer[9..]).parse().unwrap()
}

#[tokio::test]
async fn requests_that_are_no_requests_of_the_api_are_refused() {
    let server = ApiServer::start("n1", &[]).await.unwrap();
    let object = slice("a").to_string();
    let json = "\r\nContent-Type: application/json";
    for (head, body, expected) in [
        (format!("POST {SLICES} HTTP/1.1{json}"), object.as_str(), 201),
        (format!("POST {SLICES} HTTP/1.1"), &object, 415),
        (format!("POST {SLICES} HTTP/1.1{json}"), "{", 400),
        (format!("POST {SLICES} HTTP/1.1{json}"), "[]", 400),
        (format!("POST {SLICES} HTTP/1.1{json}"), r#"{"kind":"Node"}"#, 400),
        (format!("POST {SLICES}/a HTTP/1.1{json}"), &object, 405),
        (format!("PATCH {SLICES}/a HTTP/1.1{json}"), &object, 405),
        (format!("GET {SLICES}?fieldSelector=spec.x%3Da HTTP/1.1"), "", 400),
        (format!("GET {SLICES}/b HTTP/1.1"), "", 404),
        ("GET /apis/resource.k8s.io/v1beta1/resourceslices HTTP/1.1".into(), "", 404),
        (format!("DELETE {SLICES}?fieldSelector=spec.nodeName%3Dn1 HTTP/1.1"), "", 200),
        (format!("GET {SLICES}/a HTTP/1.1"), "", 404),
    ] {
        assert_eq!(code(&server, &head, body).await, expected, "{head}");
    }
    let head = format!("POST {SLICES} HTTP/1.1{json}\r\nContent-Length: 4000000");
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    stream.write_all(format!("{head}\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    server.add_user(Some("t"), User::Admin);
    assert_eq!(code(&server, &format!("GET {SLICES} HTTP/1.1"), "").await, 401);
    let head = format!("GET {SLICES} HTTP/1.1\r\nAuthorization: Bearer t");
    assert_eq!(code(&server, &head, "").await, 200);
}

fn event() -> Value {
    let at = "2026-01-02T03:04:05Z";
    json!({
        "apiVersion": "v1", "kind": "Event", "metadata": { "name": "p.1", "namespace": "team" },
        "involvedObject": { "apiVersion": "v1", "kind": "Pod", "namespace": "team", "name": "p",
                            "uid": "u" },
        "reason": "R", "message": "m", "source": { "component": "c", "host": "n1" },
        "firstTimestamp": at, "lastTimestamp": at, "count": 1, "type": "Warning", "action": "a",
        "reportingComponent": "c", "reportingInstance": "n1",
    })
}

#[tokio::test]
async fn events_and_their_patches_are_strict() {
    let server = ApiServer::start("n1", &[]).await.unwrap();
    let events = "/api/v1/namespaces/team/events";
    let json = "\r\nContent-Type: application/json";
    let patch = "\r\nContent-Type: application/strategic-merge-patch+json";
    let long = "m".repeat(1025);
    for (path, value, expected) in [
        ("unknown", "1", 400),
        ("count", "\"1\"", 400),
        ("count", "0", 422),
        ("type", "\"Error\"", 400),
        ("firstTimestamp", "\"yesterday\"", 400),
        ("firstTimestamp", "\"2026-01-02T03:04:05.123Z\"", 400),
        ("involvedObject/namespace", "\"other\"", 422),
        ("involvedObject/uid", "\"\"", 422),
        ("message", &format!("\"{long}\""), 422),
        ("reason", "\"R\"", 201),
    ] {
        let mut object = event();
        set(&mut object, path, serde_json::from_str(value).unwrap());
        let head = format!("POST {events} HTTP/1.1{json}");
        assert_eq!(code(&server, &head, &object.to_string()).await, expected, "{path}: {value}");
    }
    for (head, body, expected) in [
        (format!("PATCH {events}/p.1 HTTP/1.1{patch}"), r#"{"count":2}"#, 200),
        (format!("PATCH {events}/p.1 HTTP/1.1{patch}"), r#"{"count":"2"}"#, 400),
        (format!("PATCH {events}/p.1 HTTP/1.1{json}"), r#"{"count":2}"#, 415),
        (format!("PATCH {events}/p.2 HTTP/1.1{patch}"), r#"{"count":2}"#, 404),
    ] {
        assert_eq!(code(&server, &head, body).await, expected, "{head} {body}");
    }
    assert_eq!(server.object(Kind::Event, "team", "p.1").unwrap()["count"], 2);
}

#[tokio::test]
async fn a_patch_of_a_node_merges_its_conditions_by_type() {
    let server = ApiServer::start("n1", &[("a", "b")]).await.unwrap();
    let head = "PATCH /api/v1/nodes/n1/status HTTP/1.1\r\nContent-Type: \
                application/strategic-merge-patch+json";
    let condition = |of: &str, status: &str| {
        let at = "2026-01-02T03:04:05Z";
        json!({ "type": of, "status": status, "reason": "R", "message": "m",
                "lastHeartbeatTime": at, "lastTransitionTime": at })
    };
    let patch = |condition: Value| json!({ "status": { "conditions": [condition] } }).to_string();
    let conditions =
        || server.object(Kind::Node, "", "n1").unwrap()["status"]["conditions"].clone();
    for (body, expected, found) in [
        (patch(condition("Ready", "True")), 200, vec![("Ready", "True")]),
        (patch(condition("Own", "False")), 200, vec![("Ready", "True"), ("Own", "False")]),
        (patch(condition("Own", "Maybe")), 400, vec![("Ready", "True"), ("Own", "False")]),
        (patch(json!({ "status": "True" })), 400, vec![("Ready", "True"), ("Own", "False")]),
        (patch(json!({ "type": "Own", "x": 1 })), 400, vec![("Ready", "True"), ("Own", "False")]),
        (
            patch(json!({ "type": "Own", "status": "True" })),
            200,
            vec![("Ready", "True"), ("Own", "True")],
        ),
        (r#"{"metadata":{"labels":null}}"#.into(), 200, vec![("Ready", "True"), ("Own", "True")]),
        (patch(json!({ "type": "Own", "$patch": "delete" })), 200, vec![("Ready", "True")]),
    ] {
        assert_eq!(code(&server, head, &body).await, expected, "{body}");
        let all = conditions();
        let all = all.as_array().unwrap().iter();
        let all = all.map(|it| (it["type"].as_str().unwrap(), it["status"].as_str().unwrap()));
        assert_eq!(all.collect::<Vec<_>>(), found, "{body}");
    }
    // A patch that changes nothing gives no version, and metadata is not a part of the status.
    let before = server.object(Kind::Node, "", "n1").unwrap();
    assert_eq!(before["metadata"]["labels"]["a"], "b");
    assert_eq!(code(&server, head, "{}").await, 200);
    assert_eq!(server.object(Kind::Node, "", "n1").unwrap(), before);
}
