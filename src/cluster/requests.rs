//! The requests for objects whose parts this program reads.

use super::client::Client;
use super::collection::{Collection, NODES, PODS, escaped};
use super::error::ClusterError;
use super::metadata::{List, Object, ObjectMeta};
use super::objects::{
    Node, ResourceClaim, SelfSubjectReview, SubjectAccessReview, TokenReview, TokenReviewStatus,
    UserInfo, VersionInfo,
};
use super::watch::METADATA;
use crate::domain::DRA_DRIVER;
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::json;
use std::collections::BTreeSet;

/// The collection of `SelfSubjectReview` objects, which are not stored.
const SELF_SUBJECT_REVIEWS: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";

/// The collection of `TokenReview` objects, which are not stored.
const TOKEN_REVIEWS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
/// The collection of `SubjectAccessReview` objects, which are not stored.
const SUBJECT_ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

impl Client {
    /// The claim of this name. `None` if the API server reports that it does not exist. To a
    /// kubelet's credentials it answers 403 in that case: the node authorizer only knows that no
    /// pod of the node uses such a claim.
    ///
    /// # Errors
    /// When the API server cannot be used, or refuses.
    pub async fn claim(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<ResourceClaim>, ClusterError> {
        let claim: Option<ResourceClaim> = self.find(&claim_path(namespace, name)).await?;
        if let Some(claim) = &claim {
            check(&claim.metadata, namespace, name)?;
        }
        Ok(claim)
    }

    /// Gives the status of a claim these fields of this program, and no others of it. Returns the
    /// claim.
    ///
    /// # Errors
    /// As [`Client::apply`]. If `patch` has a UID and the claim has another, the answer is 422.
    pub async fn apply_claim_status(
        &self,
        namespace: &str,
        name: &str,
        patch: &impl Serialize,
    ) -> Result<ResourceClaim, ClusterError> {
        let path = claim_path(namespace, name);
        // With `force`, a field that another program has changed becomes this program's again.
        let path = format!("{path}/status?fieldManager={DRA_DRIVER}&force=true");
        let claim: ResourceClaim = self.apply(&path, patch).await?;
        check(&claim.metadata, namespace, name)?;
        Ok(claim)
    }

    /// The node of this name. `None` if the API server reports that it does not exist.
    ///
    /// # Errors
    /// When the API server cannot be used, or refuses.
    pub async fn node(&self, name: &str) -> Result<Option<Node>, ClusterError> {
        let node: Option<Node> = self.find(&Collection::at(NODES).object(name)).await?;
        if let Some(node) = &node {
            check(&node.metadata, "", name)?;
        }
        Ok(node)
    }

    /// Creates an Event of core v1 in a namespace.
    ///
    /// # Errors
    /// As [`Client::create`].
    pub async fn create_event(
        &self,
        namespace: &str,
        event: &impl Serialize,
    ) -> Result<(), ClusterError> {
        let IgnoredAny = self.create(&events(namespace), event).await?;
        Ok(())
    }

    /// Changes fields of an Event.
    ///
    /// # Errors
    /// As [`Client::patch`].
    pub async fn patch_event(
        &self,
        namespace: &str,
        name: &str,
        patch: &impl Serialize,
    ) -> Result<(), ClusterError> {
        let path = format!("{}/{}", events(namespace), escaped(name));
        let IgnoredAny = self.patch(&path, patch).await?;
        Ok(())
    }

    /// Changes fields of a node's status. Returns the node.
    ///
    /// # Errors
    /// As [`Client::patch`].
    pub async fn patch_node_status(
        &self,
        name: &str,
        patch: &impl Serialize,
    ) -> Result<Node, ClusterError> {
        let path = format!("{}/status", Collection::at(NODES).object(name));
        let node: Node = self.patch(&path, patch).await?;
        check(&node.metadata, "", name)?;
        Ok(node)
    }

    /// The version of the API server: `v1.36.1`.
    ///
    /// # Errors
    /// When the API server cannot be used, or refuses.
    pub async fn version(&self) -> Result<String, ClusterError> {
        let info: VersionInfo = self.get("/version").await?;
        Ok(info.git_version)
    }

    /// The UIDs of the pods that are bound to a node, also of those that have ended and still
    /// exist. A kubelet's credentials may list the pods of its own node only.
    ///
    /// # Errors
    /// When the API server cannot be used, or refuses.
    pub async fn pods_of(&self, node: &str) -> Result<BTreeSet<String>, ClusterError> {
        let pods = Collection::at(PODS).with_field("spec.nodeName", node);
        let list: List<Object> = self.list_as(&pods, METADATA.list).await?;
        Ok(list.items.into_iter().map(|pod| pod.metadata.uid).collect())
    }

    /// Who the API server takes this program for.
    ///
    /// # Errors
    /// When the API server cannot be used, or refuses.
    pub async fn who_am_i(&self) -> Result<UserInfo, ClusterError> {
        let question = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview",
        });
        let review: SelfSubjectReview = self.review(SELF_SUBJECT_REVIEWS, &question).await?;
        Ok(review.status.user_info)
    }

    /// The user of a token. `None` if the API server does not accept it, as for its own clients.
    ///
    /// # Errors
    /// When the API server cannot be used, or refuses.
    pub async fn user_of_token(&self, token: &str) -> Result<Option<UserInfo>, ClusterError> {
        let question = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": { "token": token },
        });
        let review: TokenReview = self.review(TOKEN_REVIEWS, &question).await?;
        let TokenReviewStatus { authenticated, user } = review.status;
        Ok((authenticated && !user.username.is_empty()).then_some(user))
    }

    /// Whether a user may `get` a path of an HTTP server that is no resource of the API.
    ///
    /// # Errors
    /// When the API server cannot be used, or refuses.
    pub async fn may_get(&self, user: &UserInfo, path: &str) -> Result<bool, ClusterError> {
        let question = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "spec": {
                "user": user.username, "uid": user.uid, "groups": user.groups, "extra": user.extra,
                "nonResourceAttributes": { "path": path, "verb": "get" },
            },
        });
        let review: SubjectAccessReview = self.review(SUBJECT_ACCESS_REVIEWS, &question).await?;
        Ok(review.status.allowed)
    }
}

fn claim_path(namespace: &str, name: &str) -> String {
    let (of, named) = (escaped(namespace), escaped(name));
    format!("/apis/resource.k8s.io/v1/namespaces/{of}/resourceclaims/{named}")
}

fn events(namespace: &str) -> String {
    format!("/api/v1/namespaces/{}/events", escaped(namespace))
}

/// An answer is about the object that was asked for: an empty name would be answered with a list.
fn check(found: &ObjectMeta, namespace: &str, name: &str) -> Result<(), ClusterError> {
    if found.name == name && found.namespace == namespace && !found.uid.is_empty() {
        return Ok(());
    }
    Err(ClusterError::Unreadable(format!(
        "it has `{}/{}` instead of `{namespace}/{name}`",
        found.namespace, found.name
    )))
}
