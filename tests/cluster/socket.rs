//! Calls on the daemon's sockets, as the kubelet makes them.

use holdfast::domain::ClaimRef;
use holdfast::kubelet::dra::service_socket;
use holdfast::kubelet::proto::dra_v1::dra_plugin_client::DraPluginClient;
use holdfast::kubelet::proto::dra_v1::{
    Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use holdfast::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use holdfast::kubelet::proto::v1beta1::{AllocateRequest, ContainerAllocateRequest, Empty};
use holdfast::kubelet::uds;
use std::fs;
use std::path::{Path, PathBuf};
use tonic::transport::Channel;

/// Runs a future to its end.
pub(crate) fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn message(claim: &ClaimRef) -> Claim {
    Claim { namespace: claim.namespace.clone(), uid: claim.uid.clone(), name: claim.name.clone() }
}

/// The driver's socket.
pub(crate) struct Driver(DraPluginClient<Channel>);

impl Driver {
    pub(crate) async fn connect() -> Self {
        let socket = service_socket(Path::new("/var/lib/kubelet")).unwrap();
        Driver(DraPluginClient::new(uds::connect(socket).await.unwrap()))
    }

    /// The number of devices, or the daemon's error.
    pub(crate) async fn prepare(&mut self, claim: &ClaimRef) -> Result<usize, String> {
        let request = NodePrepareResourcesRequest { claims: vec![message(claim)] };
        let answer = self.0.node_prepare_resources(request).await.unwrap().into_inner();
        let answer = &answer.claims[&claim.uid];
        let error = answer.error.clone();
        if error.is_empty() { Ok(answer.devices.len()) } else { Err(error) }
    }

    pub(crate) async fn unprepare(&mut self, claim: &ClaimRef) {
        let request = NodeUnprepareResourcesRequest { claims: vec![message(claim)] };
        let answer = self.0.node_unprepare_resources(request).await.unwrap().into_inner();
        assert_eq!(answer.claims[&claim.uid].error, "");
    }
}

/// Prepare of one claim.
pub(crate) fn prepare(claim: &ClaimRef) -> Result<usize, String> {
    wait(async { Driver::connect().await.prepare(claim).await })
}

/// The socket of the only resource of the device plugin, and its ids.
pub(crate) struct Plugin {
    client: DevicePluginClient<Channel>,
    pub(crate) ids: Vec<String>,
}

impl Plugin {
    pub(crate) async fn connect() -> Self {
        let sockets = fs::read_dir("/var/lib/kubelet/device-plugins/.holdfast").unwrap();
        let sockets = sockets.map(|entry| entry.unwrap().path());
        let is_socket = |path: &PathBuf| path.extension().is_some_and(|it| it == "sock");
        // Their names end with the number of the registration; the last one is in use.
        let socket = sockets.filter(is_socket).max().unwrap();
        let mut client = DevicePluginClient::new(uds::connect(socket).await.unwrap());
        let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
        let list = lists.message().await.unwrap().unwrap();
        Plugin { client, ids: list.devices.into_iter().map(|device| device.id).collect() }
    }

    pub(crate) async fn allocate(&mut self, id: &str) {
        let request = ContainerAllocateRequest { devices_ids: vec![id.to_owned()] };
        let request = AllocateRequest { container_requests: vec![request] };
        self.client.allocate(request).await.unwrap();
    }
}
