//! Questions that the API server answers without storing anything: who asks, what it may do, which
//! versions of an API are served, and which version it has.

use super::access::{Bound, User, Verb};
use super::http::{Request, body};
use super::profile::Profile;
use super::refusal::Refusal;
use super::target::{Kind, Selector, Target};
use serde_json::{Value, json};

const SUBJECT: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
const ACCESS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
const GROUP: &str = "/apis/resource.k8s.io";

/// The answer, with its code; `None` if it is none of these questions.
pub(super) fn answer(
    request: &Request,
    user: &User,
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
