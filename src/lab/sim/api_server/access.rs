//! Who may do what: the node authorizer and the admission plugin `NodeRestriction` of Kubernetes,
//! and the rights of this program's service account; pure.

use super::refusal::Refusal;
use super::target::{Kind, Selector, Target};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Who sends a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum User {
    /// May do everything.
    Admin,
    /// The kubelet of this node: `system:node:<name>`.
    Kubelet(String),
    /// This program's service account with all its rights. The token is bound to a pod on this
    /// node, if it has one.
    Pod(Option<String>),
    /// The service account with the right to read nodes only.
    Reader,
    /// The service account of Prometheus, which may get `/metrics` and nothing else.
    Scraper,
}

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
    DeleteAll,
}

impl Verb {
    pub(super) fn word(self) -> &'static str {
        match self {
            Verb::Get => "get",
            Verb::List => "list",
            Verb::Watch => "watch",
            Verb::Create => "create",
            Verb::Update => "update",
            Verb::Patch => "patch",
            Verb::Delete => "delete",
            Verb::DeleteAll => "deletecollection",
        }
    }
}

/// The claims of the pods that are bound to a node: node, namespace, name.
pub(super) type Bound = BTreeSet<(String, String, String)>;

/// The users by their tokens; `None` is a request without one.
pub(super) type Users = BTreeMap<Option<String>, User>;

impl User {
    fn name(&self) -> String {
        match self {
            User::Admin => "admin".into(),
            User::Kubelet(node) => format!("system:node:{node}"),
            User::Pod(_) | User::Reader => "system:serviceaccount:holdfast:holdfast".into(),
            User::Scraper => "system:serviceaccount:monitoring:prometheus".into(),
        }
    }

    /// Whether it may create `TokenReview` and `SubjectAccessReview` objects. The kubelet's
    /// credentials may, by the role `system:node`.
    pub(super) fn may_review(&self) -> bool {
        !matches!(self, User::Reader | User::Scraper)
    }

    /// The refusal of such an object.
    pub(super) fn may_not_review(&self, plural: &'static str) -> Refusal {
        let message = format!(
            "{plural} is forbidden: User \"{}\" cannot create resource \"{plural}\"",
            self.name()
        );
        Refusal::new(403, message).of(plural, "")
    }

    /// Whether a subject with its name and these groups may get `/metrics`. The right of an
    /// administrator is that of a group.
    pub(super) fn reads_metrics(&self, groups: &Value) -> bool {
        match self {
            User::Scraper => true,
            User::Admin => *groups == self.info()["groups"],
            User::Kubelet(_) | User::Pod(_) | User::Reader => false,
        }
    }

    /// `UserInfo` of authentication.k8s.io/v1.
    pub(super) fn info(&self) -> Value {
        let groups = match self {
            User::Admin => ["system:masters", "system:authenticated"],
            User::Kubelet(_) => ["system:nodes", "system:authenticated"],
            User::Pod(_) | User::Reader | User::Scraper => {
                ["system:serviceaccounts", "system:authenticated"]
            }
        };
        let mut info = json!({ "username": self.name(), "groups": groups });
        if let User::Pod(Some(node)) = self {
            info["extra"] = json!({ "authentication.kubernetes.io/node-name": [node] });
        }
        info
    }

    /// Whether the user may do this, before the object is known. `old` is the stored object.
    pub(super) fn authorize(
        &self,
        verb: Verb,
        target: &Target,
        selector: &Selector,
        old: Option<&Value>,
        bound: &Bound,
    ) -> Result<(), Refusal> {
        let name = target.name.as_deref().unwrap_or_default();
        let is_allowed = match self {
            User::Admin => true,
            User::Scraper => false,
            User::Pod(_) => match target.kind {
                Kind::ResourceSlice => true,
                Kind::ResourceClaim if target.is_status => verb == Verb::Patch,
                Kind::ResourceClaim => verb == Verb::Get,
                Kind::Node if target.is_status => verb == Verb::Patch,
                Kind::Node => matches!(verb, Verb::Get | Verb::List | Verb::Watch),
                Kind::Event => matches!(verb, Verb::Create | Verb::Patch),
                Kind::Pod => false,
            },
            User::Reader => {
                target.kind == Kind::Node
                    && !target.is_status
                    && matches!(verb, Verb::Get | Verb::List | Verb::Watch)
            }
            User::Kubelet(node) => match (target.kind, verb) {
                // The role `system:node` has these rights; `admit` limits them to the own node.
                (Kind::Node, Verb::Patch) => target.is_status,
                (Kind::Event, Verb::Create | Verb::Update | Verb::Patch) => true,
                (Kind::Node, Verb::Get | Verb::Update) => name == node,
                (Kind::Node, Verb::List | Verb::Watch) => {
                    selector.required("metadata.name") == Some(node)
                }
                (Kind::ResourceSlice, Verb::Create) => true,
                (Kind::Pod, Verb::List | Verb::Watch)
                | (Kind::ResourceSlice, Verb::List | Verb::Watch | Verb::DeleteAll) => {
                    selector.required("spec.nodeName") == Some(node)
                }
                // The authorizer only knows the slices that exist: for others it answers 403.
                (Kind::ResourceSlice, _) => {
                    old.is_some_and(|old| old["spec"]["nodeName"].as_str() == Some(node))
                }
                (Kind::ResourceClaim, Verb::Get) => {
                    let claim = (node.clone(), target.namespace.clone(), name.to_owned());
                    old.is_some() && bound.contains(&claim)
                }
                _ => false,
            },
        };
        if is_allowed && (!target.is_status || verb == Verb::Patch || *self == User::Admin) {
            return Ok(());
        }
        Err(self.forbidden(verb, target, "no relationship found between the user and this object"))
    }

    /// Whether the user may write this object: only slices of the own node, and its status.
    pub(super) fn admit(
        &self,
        verb: Verb,
        target: &Target,
        old: Option<&Value>,
        new: Option<&Value>,
    ) -> Result<(), Refusal> {
        let is_node = target.kind == Kind::Node && verb == Verb::Patch;
        let is_slice = target.kind == Kind::ResourceSlice;
        let node = match self {
            _ if !is_node && !is_slice => return Ok(()),
            User::Kubelet(node) | User::Pod(Some(node)) => node,
            User::Pod(None) if verb != Verb::DeleteAll => {
                return Err(denied(target, "the token names no node"));
            }
            User::Admin | User::Pod(None) | User::Reader | User::Scraper => return Ok(()),
        };
        let name = target.name.as_deref().unwrap_or_default();
        if is_node && name != node {
            return Err(match self {
                User::Pod(_) => denied(target, "not the node of the requesting user"),
                _ => {
                    let why = format!("node \"{node}\" is not allowed to modify node \"{name}\"");
                    let message = format!("nodes \"{name}\" is forbidden: {why}");
                    Refusal::new(403, message).of("nodes", name)
                }
            });
        }
        let is_own = |object: &Value| object["spec"]["nodeName"].as_str() == Some(node);
        if is_slice && !old.into_iter().chain(new).all(is_own) {
            let why = "can only write slices with the node of the requesting user";
            return Err(match self {
                User::Pod(_) => denied(target, why),
                _ => self.forbidden(verb, target, why),
            });
        }
        Ok(())
    }

    /// Whether the user may patch what this driver reports about the devices of a claim
    /// (`AuthorizedForDeviceStatus` of Kubernetes 1.36). `allocated_on` is the node that the
    /// claim's node selector names.
    pub(super) fn may_report(&self, driver: &str, allocated_on: Option<&str>) -> bool {
        match self {
            User::Admin => true,
            // `associated-node:patch` of `resourceclaims/driver`, for this driver only.
            User::Pod(Some(node)) => driver == "holdfast.dev" && allocated_on == Some(node),
            User::Pod(None) | User::Kubelet(_) | User::Reader | User::Scraper => false,
        }
    }

    /// The refusal of such a patch, in the words of the API server.
    pub(super) fn may_not_report(&self, driver: &str) -> String {
        format!(
            "Forbidden: changing status.devices requires resource=\"resourceclaims/driver\", \
             verb=\"[associated-node:patch arbitrary-node:patch]\" permission: \
             resourceclaims.resource.k8s.io \"{driver}\" is forbidden: User \"{}\" cannot \
             associated-node:patch resource \"resourceclaims/driver\"",
            self.name()
        )
    }

    fn forbidden(&self, verb: Verb, target: &Target, why: &str) -> Refusal {
        let (plural, name) = (target.kind.plural(), target.name.as_deref().unwrap_or_default());
        let part = if target.is_status { "/status" } else { "" };
        let message = format!(
            "{plural} \"{name}\" is forbidden: User \"{}\" cannot {} resource \"{plural}{part}\" \
             in API group \"{}\": {why}",
            self.name(),
            verb.word(),
            target.kind.group()
        );
        Refusal::new(403, message).of(plural, name)
    }
}

/// The refusal of a `ValidatingAdmissionPolicy`.
fn denied(target: &Target, why: &str) -> Refusal {
    let (plural, name) = (target.kind.plural(), target.name.as_deref().unwrap_or_default());
    let message = format!(
        "{plural}.{} \"{name}\" is forbidden: ValidatingAdmissionPolicy 'holdfast-dra' with binding \
         'holdfast-dra' denied request: {why}",
        target.kind.group()
    );
    Refusal::new(403, message).of(plural, name)
}
