//! Questions that the API server answers without storing anything: who asks, what it may do, which
//! versions of an API are served, and which version it has.

use super::access::{Bound, User, Users, Verb};
use super::http::{Request, body};
use super::profile::Profile;
use super::refusal::Refusal;
use super::target::{Kind, Selector, Target};
use serde_json::{Value, json};

const SUBJECT: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
const ACCESS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
const TOKENS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
const SUBJECTS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
const GROUP: &str = "/apis/resource.k8s.io";
/// The path that a scraper may get.
const METRICS: &str = "/metrics";

/// The answer, with its code; `None` if it is none of these questions.
pub(super) fn answer(
    request: &Request,
    user: &User,
    users: &Users,
    bound: &Bound,
    profile: Profile,
) -> Option<Result<(u16, Value), Refusal>> {
    match (request.method.as_str(), request.path.as_str()) {
        ("POST", SUBJECT) => Some(body(request).map(|mut review| {
            review["status"] = json!({ "userInfo": user.info() });
            (201, review)
        })),
        ("POST", ACCESS) => Some(body(request).map(|mut review| {
            let is_allowed = may(user, &review["spec"]["resourceAttributes"], bound);
            review["status"] = json!({ "allowed": is_allowed });
            (201, review)
        })),
        ("POST", TOKENS | SUBJECTS) if !user.may_review() => {
            let is_token = request.path == TOKENS;
            let plural = if is_token { "tokenreviews" } else { "subjectaccessreviews" };
            Some(Err(user.may_not_review(plural)))
        }
        ("POST", TOKENS) => Some(body(request).map(|mut review| {
            let token = review["spec"]["token"].as_str().map(str::to_owned);
            let found = token.is_some().then(|| users.get(&token)).flatten();
            review["status"] = match found {
                Some(user) => json!({ "authenticated": true, "user": user.info() }),
                None => json!({ "user": {}, "error": "invalid bearer token" }),
            };
            (201, review)
        })),
        ("POST", SUBJECTS) => Some(body(request).map(|mut review| {
            let spec = &review["spec"];
            let asked = &spec["nonResourceAttributes"];
            let is_get = asked["verb"] == "get" && asked["path"] == METRICS;
            let subject = users.values().find(|user| user.info()["username"] == spec["user"]);
            let is_allowed =
                is_get && subject.is_some_and(|user| user.reads_metrics(&spec["groups"]));
            review["status"] = json!({ "allowed": is_allowed });
            (201, review)
        })),
        ("GET", GROUP) => {
            let version = json!({ "groupVersion": "resource.k8s.io/v1", "version": "v1" });
            let group = json!({
                "kind": "APIGroup", "apiVersion": "v1", "name": "resource.k8s.io",
                "versions": [version], "preferredVersion": version,
            });
            Some(Ok((200, group)))
        }
        ("GET", "/version") => {
            let minor = [(Profile::V1_34, "34"), (Profile::V1_35, "35")]
                .into_iter()
                .find_map(|(known, minor)| (known == profile).then_some(minor));
            let minor = minor.unwrap_or("36");
            let version = format!("v1.{minor}.0");
            Some(Ok((200, json!({ "major": "1", "minor": minor, "gitVersion": version }))))
        }
        _ => None,
    }
}

/// Whether the user may do this, without a selector. Without a name it is about any object.
fn may(user: &User, asked: &Value, bound: &Bound) -> bool {
    let text = |field: &str| asked[field].as_str().unwrap_or_default();
    let kinds = [Kind::Node, Kind::ResourceSlice, Kind::ResourceClaim, Kind::Event];
    let is_asked = |kind: &Kind| kind.plural() == text("resource") && kind.group() == text("group");
    let verbs = [
        Verb::Get,
        Verb::List,
        Verb::Watch,
        Verb::Create,
        Verb::Update,
        Verb::Patch,
        Verb::Delete,
        Verb::DeleteAll,
    ];
    let verb = verbs.into_iter().find(|verb| verb.word() == text("verb"));
    let Some((kind, verb)) = kinds.into_iter().find(is_asked).zip(verb) else { return false };
    let name = Some(text("name").to_owned()).filter(|name| !name.is_empty());
    let is_status = text("subresource") == "status";
    let target = Target { kind, namespace: text("namespace").to_owned(), name, is_status };
    user.authorize(verb, &target, &Selector::default(), None, bound).is_ok()
}
