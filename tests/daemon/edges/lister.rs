//! A pod-resources API with answers that a test sets: for answers that a kubelet gives only when it
//! is overloaded or young.

use crate::common::Node;
use holdfast::kubelet::proto::podresources_v1 as api;
use holdfast::kubelet::proto::podresources_v1::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Its answer to List.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    /// These pods, all at a time: Get is not offered.
    Pods(Vec<api::PodResources>),
    /// These pods, also one by one.
    Single(Vec<api::PodResources>),
    /// The rate limit is exceeded.
    Busy,
    /// No answer.
    Never,
}

/// The server. It ends with this value.
#[derive(Debug)]
pub(crate) struct Lister {
    answer: watch::Sender<Answer>,
    requests: watch::Receiver<usize>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for Lister {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Lister {
    /// Serves in place of the kubelet, through the node's configuration.
    pub(crate) fn start(node: &Node, answer: Answer) -> Lister {
        let socket = node.path("lister.sock");
        let text = std::fs::read_to_string(node.config_file()).unwrap();
        node.write_config(&format!(
            "{text}[kubelet]\npod_resources_socket = \"{}\"\n",
            socket.display()
        ));
        let ((answer, answers), (count, requests)) = (watch::channel(answer), watch::channel(0));
        let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
        let service = PodResourcesListerServer::new(Service { answers, count });
        let server = tokio::spawn(async move {
            Server::builder().serve_with_incoming(service, incoming).await.unwrap();
        });
        Lister { answer, requests, server }
    }

    pub(crate) fn answers(&self, answer: Answer) {
        self.answer.send_replace(answer);
    }

    /// The number of List calls.
    pub(crate) fn requests(&self) -> usize {
        *self.requests.borrow()
    }

    /// Waits until there were `times` List calls.
    pub(crate) async fn was_requested(&self, times: usize) {
        let mut requests = self.requests.clone();
        crate::common::soon("a listing", requests.wait_for(|requests| *requests >= times))
            .await
            .unwrap();
    }
}

struct Service {
    answers: watch::Receiver<Answer>,
    count: watch::Sender<usize>,
}

#[tonic::async_trait]
impl PodResourcesLister for Service {
    async fn list(
        &self,
        _: Request<api::ListPodResourcesRequest>,
    ) -> Result<Response<api::ListPodResourcesResponse>, Status> {
        let answer = self.answers.borrow().clone();
        self.count.send_modify(|count| *count += 1);
        match answer {
            Answer::Pods(pod_resources) | Answer::Single(pod_resources) => {
                Ok(Response::new(api::ListPodResourcesResponse { pod_resources }))
            }
            Answer::Busy => Err(Status::resource_exhausted("rejected by rate limit")),
            Answer::Never => std::future::pending().await,
        }
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<api::AllocatableResourcesRequest>,
    ) -> Result<Response<api::AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("not offered"))
    }

    async fn get(
        &self,
        request: Request<api::GetPodResourcesRequest>,
    ) -> Result<Response<api::GetPodResourcesResponse>, Status> {
        let Answer::Single(pods) = self.answers.borrow().clone() else {
            return Err(Status::unimplemented("not offered"));
        };
        let asked = request.into_inner();
        let is_asked = |pod: &api::PodResources| {
            (&pod.namespace, &pod.name) == (&asked.pod_namespace, &asked.pod_name)
        };
        match pods.into_iter().find(is_asked) {
            Some(pod) => {
                Ok(Response::new(api::GetPodResourcesResponse { pod_resources: Some(pod) }))
            }
            None => Err(Status::unknown(format!("pod {} not found", asked.pod_name))),
        }
    }
}
